"""Tables of texts as Markdown, LaTeX and CSV, and any text as each would show it character for character.

A table is a pandas DataFrame of texts: its index names the rows, its columns are headings in one line or, as a
MultiIndex, in two; where the columns have a name, it stands above the rows' names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fedsweep.results.texts import MISSING

if TYPE_CHECKING:
    import pandas as pd

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "\0": "{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "“": "``",
    "”": "''",
    '"': "''",  # \textquotedbl is not in LaTeX's default encoding
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "\u00d7": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "→": r"$\to$",
    "≈": r"$\approx$",
    "≠": r"$\neq$",
    "\u2212": "$-$",
    "·": r"$\cdot$",
    "\u2013": "--",
    "—": "---",
    "…": r"\dots{}",
    **dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ", map(r"$\{}$".format, (
        "alpha", "beta", "gamma", "delta", "varepsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu",
        "xi", "pi", "rho", "sigma", "tau", "upsilon", "varphi", "chi", "psi", "omega",
        "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
    )), strict=True)),
}  # fmt: skip


def markdown_text(text: str) -> str:
    """Text as GitHub's Markdown shows it; brackets stay readable, but make no link, box or definition of a link."""
    return escape(re.sub(r"([\\`*_|~#$]|^\[|(?<=\])[(\[])", r"\\\1", text), quote=False)


def markdown_table(frame: pd.DataFrame, *, strong: Collection[tuple[int, int]] = ()) -> list[str]:
    """Return the lines of GitHub's Markdown, which knows one line of headings: two are written into one.

    Written here since pandas' ``to_markdown`` needs one more dependency and escapes nothing.

    Args:
        frame: Of texts.
        strong: Row and column of cells that are bold.
    """
    above = frame.columns.map(" ".join) if frame.columns.nlevels > 1 else frame.columns
    rows = [[markdown_text(str(cell)) for cell in cells] for cells in frame.itertuples(name=None)]
    for row, column in strong:
        rows[row][column + 1] = f"**{rows[row][column + 1]}**"
    head = [markdown_text(str(cell)) for cell in (frame.columns.names[0] or "", *above)]
    return [_markdown_row(head), f"| :--- |{' ---: |' * len(above)}", *map(_markdown_row, rows)]


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def csv_table(frame: pd.DataFrame) -> str:
    """Write a frame without its index as CSV whose foreign texts no spreadsheet takes for formulas.

    Numbers are written as they are; a text that begins like a formula gets an apostrophe in front, column names too.
    """
    return frame.rename(columns=_no_formula).map(_no_formula).to_csv(index=False, lineterminator="\n").rstrip("\n")


def _no_formula(cell: object) -> object:
    """Mark a text that a spreadsheet would compute; OWASP's list of first characters."""
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) and cell != MISSING
    return f"'{cell}" if is_formula else cell


def unicode_text(text: str) -> str:
    r"""Return text in which ``$\alpha$`` and its like are the letters that :func:`latex_text` writes so."""
    for character, command in _LATEX.items():
        text = text.replace(command, character) if command.startswith("$") else text
    return text


def latex_text(text: object) -> str:
    """Return text as LaTeX sets it, in any encoding of its fonts; two hyphens stay two."""
    apart = re.sub("-(?=-)", "-\0", re.sub('"([^"]*)"', r"“\1”", str(text)))
    return "".join(_LATEX.get(character, character) for character in apart)


def latex_row_name(name: object) -> str:
    """Return a name as :func:`latex_text` does; the end of the row above would take a bracket or a star for its own."""
    return re.sub(r"^(?=[\[*])", "{}", latex_text(name))


def latex_tabular(frame: pd.DataFrame) -> list[str]:
    """Return the lines of a ``tabular``, for the package ``booktabs``.

    Args:
        frame: Its cells are LaTeX already, since parts of them may be bold; names and headings are texts.
    """
    names: list[Any] = [None if name is None else latex_text(name) for name in frame.columns.names]
    frame = frame.rename_axis(columns=names)
    style = frame.style.format_index(latex_row_name, axis="index").format_index(latex_text, axis="columns")
    columns = f"l{'r' * len(frame.columns)}"
    lines = style.to_latex(hrules=True, column_format=columns, multicol_align="c").splitlines()
    if frame.columns.nlevels > 1:
        # The styler draws no rules between the two lines of headings.
        rules, start = "", 2
        for _, group in groupby(frame.columns.get_level_values(0)):
            end = start + len(list(group))
            rules += rf"\cmidrule(lr){{{start}-{end - 1}}}"
            start = end
        lines.insert(lines.index(r"\toprule") + 2, rules)
    return lines
