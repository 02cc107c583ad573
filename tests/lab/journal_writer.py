"""A process that writes to a journal until it is killed, and says after each append that it was acknowledged.

`python -m tests.lab.journal_writer PATH NAME [COUNT]`
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from state.events import NoteAdded
from state.journal import Journal


def main() -> None:
    path, name = Path(sys.argv[1]), sys.argv[2]
    wanted = range(int(sys.argv[3])) if len(sys.argv) > 3 else count()
    with Journal.open(path) as journal:
        for i in wanted:
            # Two events an append: after a kill there must be both or neither.
            records = journal.append(NoteAdded(text=f"{name} {i} a"), NoteAdded(text=f"{name} {i} b"), actor=name)
            sys.stdout.write(f"{name} {i} {records[-1].id}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
