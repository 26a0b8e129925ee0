"""Damaged files. First --resume of damaged folders: whatever is broken in one, the run goes on, or one sentence names the file and no file is
changed. Each case damages one thing in the folder of a finished run of two steps. Then
what a kill leaves between two renames, and values that no flag or reward should have."""

import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.folder import LOGS, Folder, signed, swap, whole_state

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
GONE = object()
ODD = (GONE, None, "text", [], {}, -1, 0.5, 1e300, math.nan, True, [[["a"]]])
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Path:
    """The folder of a run of two steps, with the checkpoints of both."""
    from recorded import go

    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        go(monkeypatch, folder, model, "--max_steps", "2", "--save_every", "1")
    return folder


def paths_in(value: object, depth: int = 3) -> Iterator[list]:
    """The place of everything in a JSON value: the keys that lead to it. Of a list only the first and the last."""
    keys = list(value) if isinstance(value, dict) else range(len(value))[:: max(1, len(value) - 1)]
    for key in keys:
        yield [key]
        if depth > 1 and isinstance(value[key], dict | list):
            yield from ([key, *rest] for rest in paths_in(value[key], depth - 1))


def put(file: Path, path: list, odd: object) -> None:
    """Replaces what lies at `path` in a JSON file."""
    document = json.loads(file.read_text())
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if odd is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = odd
    file.write_text(json.dumps(document))


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "step-000002"


Case = tuple[str, Callable[[Path], object]]


def states(finished: Path) -> Iterator[Case]:
    """Each value of state.json gone, or of another type."""
    state = json.loads((checkpoint_of(finished) / "state.json").read_text())
    draw = random.Random(0)
    for path in paths_in(state):
        for odd in ODD if len(path) == 1 else draw.sample(ODD, 4):
            yield f"state {path} {odd}", lambda run, p=path, o=odd: put(checkpoint_of(run) / "state.json", p, o)
    for text in ("", "{", "[]", "null", "5", DEEP, "\0" * 99):
        yield f"state.json {text[:9]!r}", lambda run, t=text: (checkpoint_of(run) / "state.json").write_text(t)


def logs(finished: Path) -> Iterator[Case]:
    """Each log cut, longer than the checkpoint knows it, with NULs, broken lines, other values, or another file."""
    for name in LOGS:
        whole = (finished / name).read_bytes()
        line = whole.index(b"\n") + 1
        contents = {
            "cut in a line": whole[:-9],
            "cut to nothing": b"",
            "without its first byte": whole[1:],
            "NULs behind": whole + bytes(4096),
            "NULs and a line behind": whole + bytes(99) + b"\n{}\n",
            "a broken line behind": whole + b'{"step": 3, "se\n{"step": 4}\n',
            "half a line behind": whole + b'{"step": 3, "se',
            "NULs in place of its end": whole[:-50] + bytes(50),
            "NULs in place of all": bytes(len(whole)),
            "NULs in the middle": whole[: line + 5] + bytes(20) + whole[line + 25 :],
            "a broken line in the middle": whole[:line] + b'{"step": 1, \n' + whole[line:],
            "bytes that are no text": whole[: line + 5] + b"\xff\xfe\x80" + whole[line + 8 :],
            "a list": b"[]\n" + whole,
            "a number": whole[:line] + b"5\n" + whole[line:],
            "a record of nothing": b"{}\n" + whole,
            "a step of nothing": whole[:line] + b'{"step": 1}\n' + whole[line:],
            "a step of null": b"".join(b'{"step": null, "seconds": null, "tokens": null}\n' for _ in range(99)),
            "deep": DEEP.encode() + b"\n" + whole,
        }
        for what, content in contents.items():
            yield f"{name}: {what}", lambda run, n=name, c=content: (run / n).write_bytes(c)
        yield f"{name} gone", lambda run, n=name: (run / n).unlink()
        yield f"{name} a folder", lambda run, n=name: ((run / n).unlink(), (run / n).mkdir())
        other = LOGS[LOGS.index(name) - 1]
        yield f"{name} is {other}", lambda run, n=name, o=other: shutil.copyfile(run / o, run / n)


def configs(finished: Path) -> Iterator[Case]:
    """Each flag in config.json gone, or of another type; and a file that is no object."""
    draw = random.Random(0)
    for name in json.loads((finished / "config.json").read_text()):
        for odd in (GONE, None, *draw.sample(ODD[2:], 2)):
            if (name, odd) == ("lr", 1e300):
                continue  # a learning rate that a flag may have, and not finite gradients
            yield f"config {name} {odd}", lambda run, n=name, o=odd: put(run / "config.json", [n], o)
    for text in ("", "{", "[]", "null", "5", "{}", DEEP, "\0" * 99):
        yield f"config.json {text[:9]!r}", lambda run, t=text: (run / "config.json").write_text(t)


def files(finished: Path) -> Iterator[Case]:
    """Each file of the checkpoint gone, empty, cut, zeros, a text, or another one; whether state.json knows it or not;
    and files where folders should be."""
    names = json.loads((checkpoint_of(finished) / "state.json").read_text())["files"]

    def damage(run: Path, name: str, change: Callable[[bytes], bytes | None], known: bool) -> None:
        file = checkpoint_of(run) / name
        content = change(file.read_bytes())
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        if known:
            state = checkpoint_of(run) / "state.json"
            put(state, ["files", name], GONE if content is None else len(content))
            state.write_text(json.dumps(signed(json.loads(state.read_text()))))

    for name in names:
        for what, change in {
            "gone": lambda old: None,
            "empty": lambda old: b"",
            "cut": lambda old: old[: len(old) // 2],
            "zeros": lambda old: bytes(len(old)),
            "a text": lambda old: b"some text\n" * 99,
            "a picture": lambda old: b"\x89PNG\r\n" + os.urandom(64),
        }.items():
            for known in (True, False):
                yield f"{name} {what} {known}", lambda run, n=name, c=change, k=known: damage(run, n, c, k)
        other = next(n for n in names if n != name)
        content = (checkpoint_of(finished) / other).read_bytes()
        yield f"{name} is {other}", lambda run, n=name, c=content: damage(run, n, lambda old: c, True)
    for name in ("model", "model.new", "model.old", "checkpoints/unfinished-1", "checkpoints/step-000009"):
        yield f"{name} a file", lambda run, n=name: (shutil.rmtree(run / n, ignore_errors=True), (run / n).touch())
    yield "no checkpoints", lambda run: shutil.rmtree(run / "checkpoints")
    yield "no checkpoint", lambda run: [shutil.rmtree(path) for path in (run / "checkpoints").iterdir()]
    yield "checkpoints a file", lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").touch())
    yield "a checkpoint under another name", lambda run: checkpoint_of(run).rename(run / "checkpoints" / "step-000007")


def links(finished: Path) -> Iterator[Case]:
    """Files and folders that lie elsewhere, and links to nowhere."""
    names = [path.name for path in finished.iterdir()] + [f"checkpoints/step-00000{n}" for n in (1, 2)]
    more = ["lock", "config.json.new", "model.new", "model.old", "checkpoints/unfinished-1", "curve.png"]

    def link(run: Path, name: str, there: bool) -> None:
        elsewhere = run.parent / "elsewhere"
        if (run / name).exists():
            (run / name).rename(elsewhere)
        elif there:
            elsewhere.write_text("mine")
        (run / name).symlink_to(elsewhere if there else "nowhere")

    for name in dict.fromkeys([*names, *more]):
        for there in (True, False):
            yield f"link {name} {there}", lambda run, n=name, t=there: link(run, n, t)


def everything(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*") if path.name != "lock"}


def record_of(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def ending(program, tmp_path: Path, case: Case, finished: Path) -> str:
    """What is wrong with how a resume of the damaged folder ends; empty if nothing is."""
    name, damage = case
    run = tmp_path / "case" / "run"
    shutil.rmtree(run.parent, ignore_errors=True)
    shutil.copytree(finished, run)
    damage(run)
    before = everything(run.parent)
    try:
        code, _, err = program("--resume", "--max_steps", "3", folder=run)
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {str(error)[:99]}"
    if code == 0:
        newest = Folder(run).newest_checkpoint()
        lines = [record_of(line) for log in LOGS for line in (run / log).read_bytes().split(b"\n")[:-1]]
        outside = [path for path in before if run not in path.parents and path.is_file()]
        if newest is None or newest[1]["step"] != 3 or not all(isinstance(line, dict) for line in lines):
            return f"{name}: exit 0, and step 3 is not there"
        return f"{name}: a file outside was changed" if any(p.read_bytes() != before[p] for p in outside) else ""
    sentence = [line for line in err.splitlines() if line]
    if code != 2 or len(sentence) != 1 or not err.startswith("train.py: "):
        return f"{name}: exit {code}: {err[-160:]}"
    if everything(run.parent) != before:
        return f"{name}: exit 2, and files changed"
    # A value of the right type that cannot work is refused as on a command line, with the name of its flag.
    flag = name.startswith("config ") and err.startswith("train.py: --")
    return "" if flag or ("--resume" in err and str(run) in err) else f"{name}: what is meant by {err[:160]}"


def test_a_state_that_was_changed_is_recognized(tmp_path, finished):
    """By its hash, whatever was changed; so one in twenty of these is run below."""
    shutil.copytree(finished, tmp_path / "run")
    file = checkpoint_of(tmp_path / "run") / "state.json"
    text = file.read_text()
    assert whole_state(file.parent)["step"] == 2
    for name, damage in states(finished):
        damage(tmp_path / "run")
        assert file.read_text() == text or whole_state(file.parent) is None, name
        file.write_text(text)


@pytest.mark.parametrize("kind", [states, logs, configs, files, links])
def test_a_damaged_folder_goes_on_or_is_one_sentence(program, tmp_path, finished, kind):
    cases = list(kind(finished))[:: 20 if kind is states else 1]
    bad = [problem for case in cases if (problem := ending(program, tmp_path, case, finished))]
    print(f"{len(bad)} bad endings of {len(cases)}")
    assert not bad, f"{len(bad)} of {len(cases)}:\n" + "\n".join(bad)


class Killed(BaseException):
    """No handler of errors sees it."""


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("what", ["checkpoint", "another checkpoint", "model"])
def test_a_kill_between_two_renames_loses_nothing(monkeypatch, tmp_path, what, at):
    """Before the first rename or the second: the next start finds the old folder under its name, or the new one."""
    folder = Folder(tmp_path)
    place = tmp_path / "model" if what == "model" else tmp_path / "checkpoints" / "step-000020"

    def save(value: str, step: int = 20) -> None:
        new = tmp_path / "model.new" if what == "model" else folder.begin_checkpoint()
        new.mkdir(exist_ok=True)
        (new / "w").write_text(value)
        swap(new, place) if what == "model" else folder.finish_checkpoint(new, step, {"step": step})

    save("9", 10)
    save("old")
    rename, calls = Path.rename, []

    def dies(self, target):
        calls.append(self)
        if len(calls) == at:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", dies)
        save("new")
    again = Folder(tmp_path)
    again.lock()
    assert (place / "w").read_text() == "old"
    if what != "model":
        assert again.newest_checkpoint()[0] == place
        save("newer", 20 if what == "checkpoint" else 30)
        assert {path.name for path in again.checkpoints()} >= {"step-000010" if what == "checkpoint" else place.name}
        assert not [path for path in (tmp_path / "checkpoints").iterdir() if not path.name[5:].isdecimal()]
    again.unlock()


def test_an_old_run_behind_a_link_is_left_alone(tmp_path):
    """--overwrite removes the link, and what another disk has stays."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    run = tmp_path / "run"
    run.mkdir()
    for name in ("checkpoints", "model", "metrics.jsonl", "curve.png"):
        (run / name).symlink_to(elsewhere / "mine" if "." in name else elsewhere)
    Folder(run).clear()
    assert not list(run.iterdir()) and (elsewhere / "mine").exists()
