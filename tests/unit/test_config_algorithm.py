"""The section `algorithm`: names as in the code, and what may not stand together."""

import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from asyncrl.algo import AGGREGATIONS, LOSSES
from asyncrl.config import read_config, to_toml
from asyncrl.config.algorithm import LOSS_KINDS, AlgorithmConfig, LossConfig
from asyncrl.config.correction import CORRECTIONS
from asyncrl.errors import ConfigError

MINIMAL = """
[model]
path = "some/model"
[task]
kind = "reverse_digits"
num_digits = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def section(loss=(), **settings):
    return AlgorithmConfig.model_validate({"loss": dict(loss), **settings})


@pytest.mark.parametrize("variant", get_args(get_args(LossConfig)[0]), ids=LOSS_KINDS)
def test_the_fields_of_a_loss_are_its_keyword_arguments(variant: type) -> None:
    kind = variant.model_fields["kind"].default
    parameters = inspect.signature(LOSSES[kind]).parameters
    keywords = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(variant.model_fields) == sorted({*keywords, "kind"} - {"num_tokens"})
    assert all(parameters[name].default is inspect.Parameter.empty for name in keywords)
    # Choices offered and choices taken are the same.
    hints = get_type_hints(LOSSES[kind])
    for name in keywords:
        if name != "num_tokens":
            assert variant.model_fields[name].annotation == hints[name]


def test_every_loss_and_aggregation_of_the_registry_can_be_configured() -> None:
    assert sorted(LOSS_KINDS) == sorted(LOSSES)
    choices = AlgorithmConfig.model_fields["aggregation"].annotation
    assert sorted(get_args(choices)) == sorted(AGGREGATIONS)


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("weight", ["token", "none"])
def test_a_loss_that_holds_mu_is_refused_with_a_weight_and_no_other(
    file: Path, kind: str, weight: str
) -> None:
    # F003.
    # F003: pi_theta / mu = (pi_theta / pi_prox) (pi_prox / mu) may enter once.
    holds_mu = kind in ("behaviour_clipped", "dppo", "topr", "m2po", "squared_log_ratio")
    overrides = [f"algorithm.loss.kind={kind}", f"algorithm.correction.weight={weight}"]
    if holds_mu and weight != "none":
        with pytest.raises(ConfigError) as caught:
            read_config(file, overrides)
        for words in (f"algorithm.loss.kind='{kind}'", "algorithm.correction.weight='token'"):
            assert words in str(caught.value)
        return
    config = read_config(file, overrides)
    assert config.algorithm.anchor == (
        "behaviour" if holds_mu else "none" if kind == "reinforce" else "proximal"
    )
    printed = file.with_name("printed.toml")
    printed.write_text(to_toml(config))
    assert read_config(printed) == config


@pytest.mark.parametrize("kind", ["cispo", "dppo"])
def test_the_anchor_of_cispo_and_dppo_decides_whether_a_weight_is_refused(kind: str) -> None:
    section({"kind": kind, "anchor": "proximal"})
    section({"kind": kind, "anchor": "behaviour"}, correction={"weight": "none"})
    with pytest.raises(ValueError, match=f"{kind}.*a second time"):
        section({"kind": kind, "anchor": "behaviour"})


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        ("reinforce", {"proximal": "interpolated"}, "does not have"),
        ("topr", {"proximal": "interpolated", "correction": {"weight": "none"}}, "does not have"),
        (
            "clipped",
            {"proximal": "interpolated", "correction": {"weight": "none"}},
            "leaves a part",
        ),
        ("clipped", {"proximal": "current", "num_minibatches": 2}, "num_minibatches=2"),
        ("gspo", {"proximal": "current", "num_minibatches": 2}, "nothing bounds"),
    ],
)
def test_a_proximal_policy_that_cancels_something_is_refused(loss, settings, words) -> None:
    # F002, F003.
    with pytest.raises(ValueError, match=words):
        section({"kind": loss}, **settings)


@pytest.mark.parametrize(
    ("loss", "settings", "resolved"),
    [
        ("clipped", {}, "current"),
        ("clipped", {"num_minibatches": 2}, "recomputed"),
        ("clipped", {"num_minibatches": 2, "proximal": "interpolated"}, "interpolated"),
        ("clipped", {"proximal": "recomputed"}, "recomputed"),
        # Nothing is anchored on pi_prox: the correction takes the whole ratio pi_theta / mu.
        ("reinforce", {"num_minibatches": 2}, "current"),
        ("topr", {"num_minibatches": 2, "correction": {"weight": "none"}}, "current"),
    ],
)
def test_auto_recomputes_only_what_a_later_update_is_clipped_around(
    loss, settings, resolved
) -> None:
    assert section({"kind": loss}, **settings).resolved_proximal == resolved


def test_the_threshold_of_dppo_follows_its_divergence(file: Path) -> None:
    dppo = ["algorithm.loss.kind=dppo", "algorithm.correction.weight=none"]
    total = read_config(file, dppo).algorithm.loss
    assert (total.divergence, total.max_rise, total.max_fall) == ("tv", 0.2, 0.2)
    kl = read_config(file, [*dppo, "algorithm.loss.divergence=kl"]).algorithm.loss
    assert (kl.max_rise, kl.max_fall) == (0.05, 0.05)
    given = ["algorithm.loss.divergence=kl", "algorithm.loss.max_rise=0.3"]
    kl = read_config(file, [*dppo, *given]).algorithm.loss
    assert (kl.max_rise, kl.max_fall) == (0.3, 0.05)


def test_tokens_of_advantage_0_are_needed_only_by_what_pulls_them() -> None:
    assert not section().every_token_pulls
    assert section(entropy_bonus=0.01).every_token_pulls
    assert section({"kind": "squared_log_ratio"}, correction={"weight": "none"}).every_token_pulls


def test_a_named_correction_sets_its_keys_and_a_key_beside_it_replaces_one(file: Path) -> None:
    config = read_config(file, ["algorithm.correction.kind=icepop"]).algorithm.correction
    assert (config.weight, config.cap, config.mask_low, config.mask_high) == ("token", 0, 0.5, 5.0)
    config = read_config(
        file,
        [
            "algorithm.correction.kind=icepop",
            "algorithm.correction.mask_high=2.0",
            "algorithm.correction.kind=icepop",
        ],
    ).algorithm.correction
    assert config.mask_high == 2.0
    # Another kind starts from its own settings again.
    config = read_config(
        file, ["algorithm.correction.mask_high=2.0", "algorithm.correction.kind=veto"]
    ).algorithm.correction
    assert (config.weight, config.cap, config.mask_high, config.veto) == ("token", 2.0, 0.0, True)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_every_named_correction_is_allowed_prints_and_reads_back(file: Path, kind: str) -> None:
    config = read_config(file, [f"algorithm.correction.kind={kind}"])
    printed = file.with_name("printed.toml")
    printed.write_text(to_toml(config))
    assert read_config(printed) == config


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("weight=none cap=2", "weight=none has none"),
        ("low=3", "low must lie below cap"),
        ("low=0.2 mask_low=0.3", "give one of them"),
        ("mask_low=0.5 mask_high=0.4", "every token is dropped"),
        ("reject_high=2", "reject=none names none"),
        ("reject=product", "without bounds"),
        ("reject=k3 reject_low=0.1 reject_high=1", "completions that are right"),
        ("reject=geometric reject_low=1.5 reject_high=1.2", "every completion is dropped"),
        ("reject=geometric reject_high=0.9", "agreement"),
        ("mask_low=1.1", "agreement"),
    ],
)
def test_settings_that_cancel_each_other_are_refused_with_the_reason(
    file: Path, settings: str, reason: str
) -> None:
    # F003
    with pytest.raises(ConfigError) as caught:
        read_config(file, [f"algorithm.correction.{item}" for item in settings.split()])
    assert reason in str(caught.value)
    assert settings.split("=", maxsplit=1)[0] in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "kind=sequence_tis reject=geometric reject_low=0.9 reject_high=1.1",
        "kind=sequence_tis reject=product reject_low=0.5 reject_high=2.0",
        "kind=none mask_low=0.5 mask_high=2.0 veto=true",
        "weight=none veto=true",
    ],
)
def test_a_weight_and_a_rejection_that_do_different_jobs_are_allowed(
    file: Path, settings: str
) -> None:
    read_config(file, [f"algorithm.correction.{item}" for item in settings.split()])


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_kind_changed_in_a_printed_config_is_what_then_corrects(file: Path, kind: str) -> None:
    # Printed keys of the old kind must not outvote the new one.
    printed = file.with_name("printed.toml")
    text = to_toml(read_config(file))
    assert text.count('kind = "token_tis"') == 1
    assert "# cap = 2.0" in text
    printed.write_text(text.replace('kind = "token_tis"', f'kind = "{kind}"'))
    overrides = [f"algorithm.correction.kind={kind}"]
    assert read_config(printed) == read_config(file, overrides)


def test_a_key_given_beside_a_kind_is_printed_as_one(file: Path) -> None:
    config = read_config(file, ["algorithm.correction.cap=4", "algorithm.correction.veto=true"])
    lines = to_toml(config).splitlines()
    assert {"cap = 4.0", "veto = true", '# weight = "token"'} <= set(lines)


def test_a_printed_config_lists_every_loss_and_correction_with_its_meaning(file: Path) -> None:
    text = to_toml(read_config(file))
    for kind in LOSS_KINDS:
        assert re.search(rf"^#   {kind}: \w*.{{20}}", text, re.MULTILINE), kind
    for kind in CORRECTIONS:
        assert re.search(rf"^# (\w+[,:;] .*)?{kind}[:,]", text, re.MULTILINE), kind
