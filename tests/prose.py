"""Check the prose of the repository: `python -m tests.prose`, as `make lint` does.

Prints and bounds the words of docs and the lines of README and CHANGELOG. Finds banned words in comments, docstrings,
messages and pages. Checks the subjects of commits made since this file was added. Code between backticks and text
between double quotes are exempt in pages and comments.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_DOCS_WORDS = 36_696
"""Maximum number of words in docs/, without results and decision records."""
MOST_README_LINES = 150
MOST_RELEASE_LINES = 60
"""Maximum number of lines of a release in CHANGELOG.md, from 0.2.0 on."""
MOST_SUBJECT = 72
"""Maximum number of characters of a commit's subject."""
BANNED = re.compile(
    r"\b(whoever|nobody|in vain|for ever|so many|says so|say so|goes on with|go on with|lest|wherefore|howsoever"
    r"|as was told|is no more|may it|but for (?!the|a|an|each)|so long as|no longer lives|lives on)\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"`[^`\n]*`|\"[^\"\n]*\"")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks under the given patterns."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def pages() -> list[Path]:
    """Return the pages of docs without results and decision records."""
    return [path for path in tracked("docs/*.md") if not {"results", "adr"} & {*path.relative_to(ROOT).parts}]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each piece of prose in a Python file or a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        plain = _FENCED.sub(lambda found: "\n" * found[0].count("\n"), text)
        yield from ((number, _QUOTED.sub("", line)) for number, line in enumerate(plain.splitlines(), 1))
        return
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, re.sub(r"`[^`\n]*`", "", line)


def banned_words() -> Iterator[str]:
    """Yield an error message for each banned word in prose."""
    for path in [*tracked("*.py"), *pages(), ROOT / "README.md", *tracked("CONTRIBUTING.md", "SECURITY.md")]:
        if path == Path(__file__):
            continue
        for number, line in prose_of(path):
            for found in BANNED.finditer(line):
                yield f"{path.relative_to(ROOT)}:{number}: '{found[0]}' in prose: {line.strip()[:100]}"


def release_lines() -> int:
    """Return the lines of the newest release in CHANGELOG.md."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next((section.count("\n") for section in sections[1:] if not section.startswith("[Unreleased]")), 0)


def bounds() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the value and the bound of each measured size."""
    yield "words of docs", sum(len(path.read_text(encoding="utf-8").split()) for path in pages()), MOST_DOCS_WORDS
    yield "lines of README.md", len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()), MOST_README_LINES
    yield "lines of the newest release in CHANGELOG.md", release_lines(), MOST_RELEASE_LINES


def long_subjects() -> Iterator[str]:
    """Yield an error message for each commit since this file was added whose subject is too long."""
    added = ["git", "log", "--diff-filter=A", "--format=%H", "--", str(Path(__file__).relative_to(ROOT))]
    first = subprocess.run(added, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not first:  # the clone is shallow, or this file is not committed yet
        return
    since = ["git", "log", "--no-merges", "--format=%h %s", f"{first[-1]}..HEAD"]
    for line in subprocess.run(since, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > MOST_SUBJECT:
            yield f"commit {commit}: the subject has {len(subject)} characters, at most {MOST_SUBJECT}: {subject}"


def main() -> int:
    """Print the sizes and every fault; return 1 if there is one."""
    faults = [*banned_words(), *long_subjects()]
    for name, value, most in bounds():
        print(f"{value:7,}  {name} (at most {most:,})")
        if value > most:
            faults.append(f"{name}: {value:,} are more than {most:,}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
