"""Screen 6: the profiles, which server runs by them, and what it says of itself right now."""

from __future__ import annotations

from tui.lines import BLANK, Column, Line, clean, heading, line, state, table, wrap
from tui.look import Look, age, amount
from tui.screens.pane import BoardPane
from tui.snapshot import ServerView, Snapshot
from tui.widgets.board import Board

# Live figures in the order in which they are asked for: name in `figures`, words, unit.
FIGURES = (
    ("gen_throughput", "tokens/s now", ""),
    ("num_running_reqs", "requests running", ""),
    ("num_queue_reqs", "requests waiting", ""),
    ("spec_accept_length", "accept length", ""),
    ("spec_accept_rate", "accept rate", ""),
    ("token_usage", "KV cache in use", ""),
    ("cache_hit_rate", "prefix cache hits", ""),
    ("num_used_tokens", "tokens in the KV cache", ""),
)


class ServerPane(BoardPane):
    NAME, DIGIT, TITLE = "server", "6", "Server"
    HINTS = (("Enter", "details"), ("l", "log"))
    HELP = """The profiles of rigbook.toml and the servers that run by them.

Started is not ready: a server is ready when it answers on its own host. The figures below the table are what the server
tells on /metrics, asked on its own host through the rig; a figure that it does not tell is unknown, not zero.
`x` starts or stops the server of the profile under the cursor (unlock with R first)."""

    def lines(self, snapshot: Snapshot, width: int) -> list[Line]:
        return server_lines(snapshot, width, self.look, self.target)

    def start(self, snapshot: Snapshot) -> str | None:
        return next((f"profile:{s.profile}" for s in snapshot.servers if s.state == "ready"), None)

    def on_board_moved(self, event: Board.Moved) -> None:
        self.redraw()


def server_lines(snapshot: Snapshot, width: int, look: Look, target: str | None = None) -> list[Line]:
    if not snapshot.servers:
        return [heading("Servers"), line(("rigbook.toml declares no profiles", "dim"))]
    rows = [
        (
            f"profile:{s.profile}",
            [
                state(look, s.state),
                (s.profile, "bold"),
                (s.engine, ""),
                (f"{s.host}:{s.port}", "dim"),
                (s.speculative or "plain", "" if s.speculative else "dim"),
                (since(s, snapshot, look), "dim"),
            ],
        )
        for s in snapshot.servers
    ]
    columns = [
        Column("state"),
        Column("profile"),
        Column("engine"),
        Column("where"),
        Column("decoding", flex=True),
        Column("since", True),
    ]
    out = [heading("Servers"), *table(columns, rows, width, look)]
    chosen = next((s for s in snapshot.servers if f"profile:{s.profile}" == target), None)
    chosen = chosen or next((s for s in snapshot.servers if s.state == "ready"), snapshot.servers[0])
    return [*out, BLANK, *detail_lines(chosen, snapshot, width, look)]


def since(server: ServerView, snapshot: Snapshot, look: Look) -> str:
    return look.dash if server.since is None else age(snapshot.at - server.since)


def detail_lines(server: ServerView, snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    out = [heading(server.profile, clean(server.detail))]
    if server.state == "ready":
        if server.figures:
            rows = []
            for name, words, unit in FIGURES:
                if name in server.figures:
                    rows.append((None, [(words, "dim"), (f"{amount(server.figures[name], look.dash)}{unit}", "bold")]))
            rows += [
                (None, [(clean(name), "dim"), (amount(value), "")])
                for name, value in sorted(server.figures.items())
                if name not in {f[0] for f in FIGURES} and isinstance(value, int | float)
            ][: 4 if rows else 12]
            out += table([Column(), Column(right=True)], rows, width, look, header=False)
            if server.figures_at is not None and snapshot.at - server.figures_at > 15:
                out.append(line((f"as of {age(snapshot.at - server.figures_at)} ago", "dim")))
        else:
            why = server.figures_problem or "not asked yet"
            out += wrap(f"live figures unknown: {clean(why)}", width, "dim")
    elif server.state in {"not started", "stopped"}:
        out.append(line(("no server runs by this profile", "dim")))
    out += wrap(f"last benchmark: {clean(server.bench) or look.dash}", width)
    if server.args:
        out.append(line(("arguments", "dim")))
        for name, value in server.args:
            out += wrap(f"{clean(name)} = {clean(value)}", width, indent="  ")
    return out
