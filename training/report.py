"""A page of a run, or of several: curves, pictures, what they are made of, what differs.

python -m training.report runs/NAME           writes it into the run's folder, as the run stands now
python -m training.report runs/NAME --serve   shows it in a browser, and again as the run goes on
python -m training.report runs/*              compares runs: report.html, runs.csv, a table in the terminal
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from runtime.config import run_main, user_mistakes
from runtime.files import write_text
from training.arms import Run, as_csv, as_text, grouped, printable, sections, table
from training.page import check, mixtures, page
from training.run_folder import RunFolder

REPORT, TABLE, PORT, REFRESH_SEC = "report.html", "runs.csv", 8000, 15
HOSTS = ("127.0.0.1", "localhost")


class Handler(BaseHTTPRequestHandler):
    """Answers a browser on this machine with the page as the run stands then."""

    folder: RunFolder
    timeout = REFRESH_SEC  # of a connection that asks nothing

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.path != "/" or host not in HOSTS:  # a page from elsewhere asks by another name
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            status, content = HTTPStatus.OK, page([Run(self.folder)], REFRESH_SEC)
        except (ValueError, OSError) as error:  # the run may be moved, and come back
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            content = f'<meta http-equiv="refresh" content="{REFRESH_SEC}">{escape(str(error))}'
        with suppress(ConnectionError):  # its window was closed
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing of each request."""


def serve(folder: RunFolder, port: int) -> None:
    """Answer browsers until Ctrl-C.

    Raises:
        OSError: the port cannot be had.
    """
    Handler.folder = folder
    try:
        server = ThreadingHTTPServer((HOSTS[0], port), Handler)
    except (OSError, OverflowError) as error:
        raise OSError(f"--serve={port}: {error}; give another port, 0 takes a free one") from error
    with server, suppress(KeyboardInterrupt):
        port = server.server_port
        print(f"{folder.path}: http://{HOSTS[0]}:{port} (Ctrl-C ends it)", flush=True)
        print(f"From another machine: ssh -L {port}:{HOSTS[0]}:{port} THIS_MACHINE, then the same address")
        server.serve_forever()


def compare(folders: Sequence[RunFolder], out: Path) -> None:
    """Write the page and the table of runs, but for those that cannot be read, and print the arms."""
    runs = []
    for folder in folders:
        try:
            folder.check_started()
            run = Run(folder)
            check(run)
            runs.append(run)
        except (ValueError, OSError) as error:
            print(f"left out: {error}")
    if not runs:
        raise ValueError("none of these is a run")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / REPORT, page(runs))
    write_text(out / TABLE, as_csv(arms := grouped(runs)))
    for data, of_data in sections(arms).items():
        notes = "".join(f"{note}\n" for note in mixtures(of_data))
        print(f"{printable(data)}\n{as_text(table(of_data))}\n{printable(notes)}")
    print(f"{out / REPORT}, {out / TABLE}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or serve it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m training.report", None, __doc__, formatter_class=raw)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--serve", nargs="?", type=int, const=PORT, metavar="PORT", help=f"of one run; default: {PORT}"
    )
    parser.add_argument("--out", type=Path, help="folder of a comparison; default: that of the first run")
    asked = parser.parse_args(arguments)
    folders = [RunFolder(run) for run in asked.runs]
    if len(folders) > 1 and asked.serve is not None:
        parser.error("--serve shows one run")
    with user_mistakes():
        if len(folders) > 1:
            # What a shell makes of runs/* has the files of earlier comparisons, too.
            compare([f for f in folders if f.path.is_dir()], asked.out or asked.runs[0].parent)
            return
        folders[0].check_started()
        if asked.serve is not None:
            serve(folders[0], asked.serve)
        else:
            out = (asked.out or asked.runs[0]) / REPORT
            out.parent.mkdir(parents=True, exist_ok=True)
            write_text(out, page([Run(folders[0])]))
            print(out)


if __name__ == "__main__":
    run_main(main)
