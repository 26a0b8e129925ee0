"""Tables as Markdown, and the marked places of a page that they go to."""

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table."""
    head, *rows = [f"| {' | '.join(map(str, row))} |" for row in (frame.columns, *frame.to_numpy())]
    return "\n".join([head, "|---" * len(frame.columns) + "|", *rows])


def without_repeats(frame: pd.DataFrame) -> str:
    """The table without the columns in which all rows agree; a line below names them. The first column stays."""
    alike = [name for name in frame.columns[1:] if len(frame) > 1 and frame[name].nunique() == 1]
    text = markdown(frame.drop(columns=alike))
    if alike:
        text += "\n\nIn all rows: " + "; ".join(f"{name} {frame[name].iloc[0]}" for name in alike) + "."
    return text


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Puts each block into a page, between the lines `<!-- refit NAME -->` and `<!-- end -->`."""
    text = page.read_text()
    for name, block in blocks.items():
        pattern = rf"(<!-- refit {re.escape(name)} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda match, block=block: f"{match[1]}{block}\n{match[2]}", text, flags=re.S)
    page.write_text(text)
    print(f"written to {page}")
