"""The page is one file that fetches nothing, and what a model writes stays text in it."""

import html
import json
import re
import shutil
import subprocess
from importlib import resources

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.report.data import collect
from asyncrl.report.page import digest, embedded, render, write_report
from tests.unit.run_folders import make_run, rollout_record, write_lines

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<svg onload=document.title='owned'> --> ]]> &lt; \u2028 @@data@@ \ud800 <b>bold</b>"
)
SCRIPTS = [
    p for p in (resources.files("asyncrl.report") / "assets").iterdir() if p.name[-3:] == ".js"
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
NODE = shutil.which("node")


@pytest.fixture
def evil_run(tmp_path):
    """Every string that comes from a model, a task or a scorer is an attack."""
    run_dir = make_run(tmp_path / "run")
    tokens = {
        "text": [EVIL, EVIL], "behaviour_logprobs": [-1.0, -1.0], "proximal_logprobs": [-1.0, None],
        "behaviour_weights": [0.0, 2.0],
    }  # fmt: skip
    record = rollout_record(
        0, 0, 0, prompt=EVIL, text=EVIL, answer=EVIL, detail=EVIL, generator=EVIL, fate=EVIL,
        verdict=EVIL, finish_reason=EVIL, tokens=tokens,
    )  # fmt: skip
    write_lines(run_dir / "rollouts.jsonl", [record])
    write_lines(run_dir / "drops.jsonl", [{"group_id": 1, "version": 0, "reason": EVIL}])
    (run_dir / "run.json").write_text(json.dumps({EVIL: EVIL}))
    (run_dir / "config.toml").write_text(f'name = "x"\n# {EVIL[:-30].encode("ascii", "replace")}\n')
    return run_dir


def data_of(page):
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


def test_what_a_model_writes_ends_no_element_and_comes_back_as_it_was(evil_run):
    page = render(collect(evil_run)).decode()
    assert page.count("<script") == page.count("</script>") == 2  # the page's own
    assert "<img" not in page
    [row] = data_of(page)["rollouts"]["rows"]
    assert row[2] == EVIL.replace("\ud800", "?")


@example("<!-- & -->\u2028\u2029")
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_embedded_json_is_the_same_value_without_a_character_that_html_reads(value):
    text = embedded(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


def test_the_script_knows_no_way_from_text_to_markup_or_code():
    for script in SCRIPTS:
        text = script.read_text()
        for door in (
            "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
            "createContextualFragment", "DOMParser", "srcdoc", "setTimeout(\"", "javascript:",
        ):  # fmt: skip
            assert door not in text, (script.name, door)


def test_nothing_is_fetched_from_anywhere(tmp_path):
    write_report(make_run(tmp_path / "run"), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r"""(?:src|href)=["'](?!#)""", page) == []
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) <= {"http://www.w3.org/2000/svg"}
    for way in ("fetch(", "XMLHttpRequest", "WebSocket", "import(", "@import", "url("):
        assert way not in page


def test_the_policy_allows_this_script_and_style_and_nothing_else(tmp_path):
    page = render(collect(make_run(tmp_path / "run"))).decode()
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    [script] = re.findall(r"<script>(.*?)</script>", page, re.S)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.S)
    assert f"script-src '{digest(script)}'" in policy
    assert f"style-src '{digest(style)}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_a_name_that_looks_like_markup_stays_a_name(tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.toml").write_text(f"name = {json.dumps('</title><script>1</script>')}\n")
    page = render(collect(run_dir)).decode()
    assert page.count("<script") == 2
    assert "<title>&lt;/title&gt;" in page


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_scripts_are_javascript(tmp_path):
    path = tmp_path / "all.js"
    path.write_text("\n".join(script.read_text() for script in SCRIPTS))
    done = subprocess.run([NODE, "--check", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def drawn(path):
    """The page as a browser drew it, and what its console said."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={path.parent / 'browser'}", "--dump-dom", f"file://{path}",
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("with_policy", [True, False])
def test_in_a_browser_an_attack_is_shown_and_does_not_run(evil_run, tmp_path, with_policy):
    page = render(collect(evil_run)).decode()
    if not with_policy:  # the other nets must hold by themselves
        page = re.sub(r"<meta http-equiv[^>]*>", "", page)
    path = tmp_path / "page.html"
    path.write_text(page)
    dom, console = drawn(path)
    assert console == []
    assert "<title>x - asyncrl</title>" in dom
    body = dom[dom.index("<main") : dom.index("</main>")]
    assert "&lt;img src=x onerror=" in body
    assert "<img" not in body
    assert "<b>bold" not in body
    assert dom.count("<script") == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_draws_every_part_without_an_error(tmp_path):
    write_report(make_run(tmp_path / "run"), tmp_path / "page.html")
    dom, console = drawn(tmp_path / "page.html")
    assert console == []
    for part in ("curves", "staleness", "bubbles", "step", "ledger", "alerts", "evals", "rollouts"):
        assert f'<h2 id="{part}">' in dom
    assert "16 of 16 rollouts" in dom
    columns = re.findall(r'<th class="num">([^<]*)', dom[dom.index('id="evals"') :])
    assert columns[2:5] == ["prompts", "samples scored", "unscored"]
    assert re.search('<td class="num">4</td><td class="num">8</td><td class="num">0</td>', dom)
    assert dom.count('class="mate') >= 2  # the group of the chosen rollout, side by side


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_draws_a_run_without_any_record(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    write_report(run_dir, tmp_path / "page.html")
    dom, console = drawn(tmp_path / "page.html")
    assert console == []
    assert "No step is on record yet." in dom
    assert "No rollouts are on record" in dom
