"""lab/adapters: a trainer's code is found in a wheel or a folder, run in part, and what cannot be had is said."""

import importlib.util
import zipfile

import pytest
import torch

from lab import conformance
from lab.adapters import score, sources

CODE = """
import not_installed

LIMIT = 3

@dataclass
class Settings:
    eps: float = 0.2
    cap: float = field(default=5.0)
    name: str = missing()


@register("double")
def double(x: not_installed.Tensor):
    return 2 * x


class Trainer:
    @staticmethod
    def clip(x):
        return min(x, LIMIT)

    async def step(self, inputs):
        with not_installed.context():
            mean = sum(inputs) / len(inputs)
            if self.centred:
                inputs = [x - mean for x in inputs]
        loss = not_installed.loss(inputs)
        return loss
"""


@pytest.fixture(params=["folder", "wheel", "purelib"])
def source(request, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    if request.param == "folder":
        (tmp_path / "tiny-1.0" / "tiny").mkdir(parents=True)
        (tmp_path / "tiny-1.0" / "tiny" / "code.py").write_text(CODE)
    else:
        with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny-1.0.data/purelib/tiny/code.py" if request.param == "purelib" else "tiny/code.py", CODE)
    return sources.Source("tiny", "1.0")


def test_functions_without_their_package(source):
    """The decorator that is no global is left out; a method of a class is a function."""
    code = source.functions("tiny/code.py", "LIMIT", "double", "Trainer.clip")
    assert (code.double(2), code.clip(7)) == (4, 3)


def test_defaults_that_are_literals(source):
    assert vars(source.defaults("tiny/code.py", "Settings")) == {"eps": 0.2, "cap": 5.0}


@pytest.mark.parametrize(("centred", "inputs"), [(True, [-1.0, 1.0]), (False, [1, 3])])
def test_statements_of_a_long_method(source, centred, inputs):
    """From inside a `with`, without what stands around them."""
    trainer = type("Fake", (), {"centred": centred})()
    found = source.run("tiny/code.py", "Trainer.step", "mean =", "if self.centred", self=trainer, inputs=[1, 3])
    assert (found["mean"], found["inputs"]) == (2.0, inputs)


def test_statements_that_return(source):
    assert source.run("tiny/code.py", "double", "return", x=4) == 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.functions("tiny/code.py", "triple"), "tiny-1.0.* has no triple in tiny/code.py"),
        (
            lambda s: s.run("tiny/code.py", "double", "y ="),
            "tiny-1.0.* has no statement 'y =' in double of tiny/code.py",
        ),
    ],
)
def test_code_that_moved_is_one_sentence(source, call, words):
    with pytest.raises(LookupError, match=words):
        call(source)


def test_another_version_is_said(source):
    assert source.note == ""
    assert sources.Source("tiny", "2.0").note == "the adapter was written for 2.0"


def test_groups_that_no_trainer_of_this_kind_gets():
    """Positions make the groups: they stand together and have one size."""
    assert sources.group_size(torch.tensor([4, 4, 2, 2])) == 2
    for ids in ([0, 1, 0, 1], [0, 0, 1]):
        with pytest.raises(NotImplementedError):
            sources.group_size(torch.tensor(ids))


def test_trainers_that_are_not_there_are_lines(tmp_path, capsys):
    assert score.main([]) == 2
    assert score.main([str(tmp_path)]) == 0
    output, errors = capsys.readouterr()
    said = [line for line in errors.splitlines() if "not asked" in line]
    assert any(line.startswith(f"verl: not asked (FileNotFoundError: {tmp_path} has no verl-VERSION") for line in said)
    assert len(said) >= 12
    assert output.splitlines()[1] == "|" + "---|" * 8


def row(verdict, kind="recipe"):
    return conformance.Row("topic", f"case {verdict}", verdict, "", "", kind)


def test_a_class_is_five_numbers():
    """Agrees or open, another definition, differs or error, not offered, not asked."""
    verdicts = [
        "agrees",
        "another definition: ddof 1",
        "another definition: cap 1 + 5",
        "differs",
        "error",
        "not asked",
    ]
    rows = [row(verdict) for verdict in verdicts] + [row("not offered", "robustness")]
    assert score.counts(rows, "recipe") == "2/1/2/0/1"
    assert score.counts(rows, "robustness") == "0/0/0/1/0"
    assert score.deviations(rows) == "cap 1 + 5; case differs; case error"


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install '.[trl]'")
def test_trl_by_its_own_step():
    """CISPO agrees, and four microbatches of TRL's own sum to the sample average, which no question asks of it."""
    from lab.adapters.trl_step import Adapter

    adapter = Adapter()
    verdicts = {row.case: row.verdict for row in conformance.check(adapter)}
    for case in ("CISPO: above the cap of 5 a token still trains", "token average: microbatches of 2 rows"):
        assert verdicts[case] == "agrees"
    assert verdicts["CISPO: π_old between π_gen and π"] == "another definition: a product of two caps"
    (case,) = [case for case in conformance.all_cases() if case.name == "token average: microbatches of 2 rows"]
    step = conformance.replace(case.inputs[0], average="sample")
    expected = conformance.expected_gradient(step).float()
    torch.testing.assert_close(conformance.gradient(adapter, step), expected)
