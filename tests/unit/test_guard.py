"""The outermost frame of a process: what it imports costs no garbage collection."""

import gc

import pytest

from asyncrl.guard import uncollected


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


def test_what_is_imported_is_out_of_the_collectors_sight_and_it_works_again_afterwards():
    with uncollected():
        assert not gc.isenabled()
        made = [object()]  # a container is what the collector keeps a list of
        assert any(each is made for each in gc.get_objects())
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())
    later = [object()]
    assert any(each is later for each in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), uncollected():
        import asyncrl.no_such_module  # noqa: F401
    assert gc.isenabled()
