"""A run that several tests look at, or go on from."""

import pytest

from tests.models import make_tiny_model
from tests.process.runs import Finished, finish, start_run, write_config


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of runs.CONFIG as it is: 8 steps, k = 2. Read it; go on from a `copy` of it."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, make_tiny_model(folder / "tiny"))
    code, output = finish(start_run(config, folder / "run"))
    assert code == 0, output
    return Finished(config, folder / "run", output)
