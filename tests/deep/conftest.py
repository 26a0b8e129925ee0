"""Runs on recorded rollouts, for several files."""

import pytest


@pytest.fixture(scope="session")
def whole(tmp_path_factory, model):
    """The folder and the end of a run of scripted.py that never stopped."""
    from recorded import go

    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, go(monkeypatch, folder, model)


@pytest.fixture
def recorded(monkeypatch, tmp_path, model):
    """Runs in tmp_path / name, on recorded rollouts."""
    from recorded import go

    return lambda name, *extra, **options: go(monkeypatch, tmp_path / name, model, *extra, **options)


@pytest.fixture
def program(monkeypatch, tmp_path, model, capsys):
    """train.py on recorded rollouts, in tmp_path / "run"."""
    from recorded import Program

    return Program(monkeypatch, tmp_path / "run", model, capsys)
