"""The text of --help: groups in columns, and keys explained by the tables of README.md files."""

import io
import re
import shutil
import signal
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from runtime.targets import CONFIGS

COMMENT_COLUMN, MAX_COMMENT = 28, 70
MAX_KEYS_IN_ROW, MIN_SHARE = 6, 0.3
ROW = re.compile(r"^\| ((?:(?:, |, or )?`[\w./]+`)+) \|(?:.*\|)? (.*) \|$", re.MULTILINE)
TARGET = re.compile(r"^( *)\w+:\n\1 +_target_: .*\n(?!\1 )|^ *_target_: .*\n", re.MULTILINE)


@contextmanager
def explained_help() -> Iterator[None]:
    """Explain the help that Hydra prints inside the block."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:  # Hydra exits
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without an error
        print(explain(printed.getvalue(), shutil.get_terminal_size((100, 24)).columns))


def explain(text: str, width: int) -> str:
    """Wrap the groups in a help text at `width` characters, and add a comment to each key."""
    if "\nKeys (" not in text:
        return text
    head, title, config = re.split(r"\n(Keys \(.*\n)", text.rstrip() + "\n", maxsplit=1)
    head = re.sub(r"^([\w/]+): (.+, .+)$", lambda group: _columns(group, width), head, flags=re.MULTILINE)
    path, lines = [], []
    for line in TARGET.sub("", config).splitlines():
        if match := re.match(r"( *)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
        lines.append((line, ".".join(path) if match else ""))
    comments = read_comments({key for _, key in lines})
    shown = [f"{line:{COMMENT_COLUMN}}  # {comments[k]}" if k in comments else line for line, k in lines]
    return "\n".join([head, title, *shown[1:]])


def read_comments(keys: set[str]) -> dict[str, str]:
    """Read the meaning of keys from README.md tables; the table with most of the keys wins."""
    cells = []
    for page in sorted(CONFIGS.parent.glob("*/README.md")):
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
            rows = [(re.findall(r"`(.*?)`", names), meaning) for names, meaning in ROW.findall(table)]
            named = [name for names, _ in rows for name in names]
            count = len(keys.intersection(named))
            is_relevant = count > MIN_SHARE * len(named)  # several programs share the names without dots
            for names, meaning in rows:
                if len(names) <= MAX_KEYS_IN_ROW:  # longer rows refer to another page
                    cells += [(count, n, _first_clause(meaning)) for n in names if "." in n or is_relevant]
    return {name: comment for _, name, comment in sorted(cells) if comment}


def _first_clause(text: str) -> str:
    text = re.sub(r" \(\[[^]]*\]\([^)]*\)\)|,? ?see (above|below).*", "", text)  # links in brackets
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", text)
    first = re.split(r"[.;] (?![^(]*\))", text)[0]  # not inside brackets
    return textwrap.shorten(first, MAX_COMMENT, placeholder=" ...")


def _columns(group: re.Match[str], width: int) -> str:
    """Put the options of a line `GROUP: OPTION, OPTION, ...` in columns if the line is too long."""
    options = group[2].split(", ")
    column = max(map(len, options)) + 2
    height = -(-len(options) // max(1, (width - 2) // column))
    rows = ["".join(f"{name:{column}}" for name in options[i::height]).rstrip() for i in range(height)]
    return group[0] if len(group[0]) <= width else "\n  ".join([f"{group[1]}:", *rows])
