"""`python -m tests.lab agents`: let coding agents, as npm and pip install them, make one small edit each with a local model.

A separate server serves the model with default settings. `--folder` has the agents: those that are missing are installed there with npm and
pip. `relaxserve launch` starts each agent, without a terminal, in a new repository with one file of three lines, and the agent is told to
mend the file. A figure is the number of requests that got a status of 400 or more; the goal is 0. The note has the requests that the agent
sent and whether the file is mended, which depends on the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.agents import AGENTS, Agent
from deploy.bench.measure import Figure, report
from tests.lab.serving.start import RELAXSERVE, serving

FILE, WRONG = "area.py", "def area(width, height):\n    # The area of a rectangle.\n    return width + height\n"
TASK = f"The function in {FILE} adds width and height. Change the file so that it multiplies them, then stop."
CHECK = "import area; assert area.area(3, 4) == 12"
PATIENCE_S = 600.0  # for one agent; without AVX-512, two cores compute a prompt of 19,000 tokens with 1.5B parameters in about 400 s
INFERENCE = re.compile(r"/v1/(chat/completions|responses|messages|completions)$")

# Arguments with which each agent answers one prompt without a terminal and edits without asking.
WITHOUT_TERMINAL: Mapping[str, tuple[str, ...]] = {
    "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    "claude": ("-p", TASK, "--permission-mode", "acceptEdits"),
    "aider": ("--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--message", TASK, FILE),
    "opencode": ("run", TASK),
    "cline": (TASK,),
    "continue": ("--auto", "-p", TASK),
    "qwen": ("--approval-mode", "yolo", TASK),
}


@dataclass(frozen=True, slots=True)
class Ran:
    """The requests and the outcome of one agent."""

    agent: str
    requests: tuple[Mapping[str, Any], ...]  # the lines about its requests in the server's access log
    seconds: float
    status: int | None  # exit status; None: it was stopped
    is_mended: bool
    said: str  # the end of its output

    def figure(self) -> Figure:
        refused = [line for line in self.requests if line["status"] >= 400]
        paths = Counter(str(line["path"]) for line in self.requests if INFERENCE.search(str(line["path"])))
        answered = [line for line in self.requests if line.get("model")]
        sent = ", ".join(f"{count} x {path}" for path, count in paths.items()) or "no request"
        tokens = f"; first prompt {answered[0]['prompt_tokens']:,} tokens" if answered else ""
        end = "stopped" if self.status is None else f"exit {self.status}"
        refusals = "".join(f"; {line['status']} {line['path']}" for line in refused)
        note = f"{sent}{tokens}; {self.seconds:.0f} s, {end}; {'mended' if self.is_mended else 'not mended'}{refusals}"
        return Figure(f"{self.agent}: refused requests", len(refused), "", 0, note=note)


def install(agent: Agent, folder: Path) -> None:
    """Install the agent below the folder, unless its program is already there."""
    if program(agent, folder).exists():
        return
    package = agent.package.split()[-1]
    if agent.package.startswith("npm"):
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder / "npm"), package]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder / agent.name)], check=True)
        command = [str(folder / agent.name / "bin" / "pip"), "install", "--quiet", package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def program(agent: Agent, folder: Path) -> Path:
    inside = "npm/node_modules/.bin" if agent.package.startswith("npm") else f"{agent.name}/bin"
    return folder / inside / agent.program


def access_lines(log: Path) -> list[Mapping[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if "path" in line]


def run(agent: Agent, folder: Path, url: str, log: Path, patience_s: float) -> Ran:
    """Let the agent mend the file in a repository and a home folder of its own."""
    before = len(access_lines(log))
    with tempfile.TemporaryDirectory(prefix="relaxserve-agent-") as place:
        repository, home = Path(place, "repository"), Path(place, "home")
        home.mkdir()
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
        (repository / FILE).write_text(WRONG)
        environment = {**os.environ, "HOME": str(home), "PATH": f"{program(agent, folder).parent}:{os.environ['PATH']}", "IS_SANDBOX": "1"}
        environment["PWD"] = str(repository)  # opencode works in the folder of this variable
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
        command = (*RELAXSERVE, "launch", agent.name, "--url", url, "--", *WITHOUT_TERMINAL[agent.name])
        began_s = time.monotonic()
        status, said = finished(command, repository, environment, patience_s)
        seconds = time.monotonic() - began_s
        is_mended = subprocess.run([sys.executable, "-c", CHECK], cwd=repository, capture_output=True).returncode == 0
    return Ran(agent.name, tuple(access_lines(log)[before:]), seconds, status, is_mended, said[-2000:])


def finished(command: tuple[str, ...], folder: Path, environment: Mapping[str, str], patience_s: float) -> tuple[int | None, str]:
    """Run the command in a session of its own, since agents start processes; kill all of them after `patience_s`. Return the exit status,
    or None if the command was killed, and the output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="a path, or a name of `relaxserve ls --available`")
    parser.add_argument("--folder", type=Path, required=True, help="where agents are, or are installed")
    parser.add_argument("--agent", action="append", choices=sorted(WITHOUT_TERMINAL), help="only this agent; can be given again")
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="seconds after which an agent is stopped")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the end of each agent's output to standard error")
    options = parser.parse_args(argv)
    agents = [AGENTS[name] for name in options.agent or WITHOUT_TERMINAL]
    for agent in agents:
        install(agent, options.folder)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="relaxserve-agents-") as place:
        log = Path(place, "server.log")
        with serving(options.model, log) as url:
            for agent in agents:
                ran = run(agent, options.folder, url, log, options.patience_s)
                figures.append(ran.figure())
                if options.show:
                    print(f"--- {agent.name}\n{ran.said}", file=sys.stderr)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
