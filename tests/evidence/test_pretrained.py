"""evidence/pretrained.py on runs made by hand."""

import pretrained
from made_curves import made


def test_a_row_of_the_table_and_the_picture(tmp_path):
    """The last eight evaluations have a mean of .661, and .380, half of the gain, is reached at 245 of 800 tokens. Half
    of those are eight evaluations and the start, and eight come later. The second run falls to 0, where no band is, and
    the half of a third one does not rise."""
    rises = made("sums", 0)
    falls = made("sums", 1, rates=[*rises.rates[:9], *[0.0] * 8])
    head, fell = (dict(zip(pretrained.HEAD, pretrained.row(run), strict=True)) for run in (rises, falls))
    assert [head[name] for name in ("run", "tokens", "in C_mid", "first")] == ["sums 0", "800", "3.3", "0.100"]
    names = ("end inside", "later ones inside", "outcome")
    assert [[cells[name] for name in names] for cells in (head, fell)] == [
        ["yes", "8 of 8", "stands"],
        ["no", "0 of 8", "falls"],
    ]
    flat = pretrained.row(made("sums", 2, rates=[0.1] * 9 + [0.5] * 8))
    assert flat[6:9] == ["none", "–", "–"] and flat[5] == "0.500"
    page = pretrained.page({"sums": [rises, falls]}, ["sums seed 2 (unfinished)"])
    assert "| sums 1 | " in page and "In all rows: tokens 800; " in page and "--loss dispo" in page
    assert "Left out: sums seed 2 (unfinished)." in page
    pretrained.picture({"sums": [rises, falls]}, tmp_path / "pretrained.png")
    assert (tmp_path / "pretrained.png").read_bytes()[:4] == b"\x89PNG"
