"""One trained run, shared by the end-to-end tests."""

import pytest

from tests.e2e.runs import Finished, run


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Finished:
    """The quickstart, whole: warm start, asynchronous reinforcement, evaluations, export."""
    done = run(tmp_path_factory.mktemp("runs") / "quickstart", "train")
    assert done.code == 0, done.stderr[-3000:]
    return done
