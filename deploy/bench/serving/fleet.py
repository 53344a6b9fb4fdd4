"""`relaxserve bench fleet --simulate`: simulate how a fleet of replicas would serve a load.

    relaxserve bench fleet --simulate --trace sessions --rate 2 --replicas 4
    relaxserve bench fleet --simulate --trace sessions --rate 2 --replicas 4 --policy all      compare ways to choose a replica
    relaxserve bench fleet --simulate --cells 4 --replicas 8 --rate 40 --fail 0                cell 0 fails in the middle
    relaxserve bench fleet --simulate --rate 3 --prompt 2048 --replicas 6 --prefill-replicas 2 --network 1e9     pages travel
    relaxserve bench fleet --measure --model MODEL > costs.json                                measure the steps of a model here
    relaxserve bench fleet --simulate --costs costs.json --rate 5

Traces: `poisson` (independent requests), `bursts` (five times the rate for ten seconds of each minute), `sessions` (agents, whose prompts
grow), `day` (little load at night). A simulated replica decides as the scheduler does, and its steps take as long as measured ones. The
policies `load`, `sessions` and `prefix` use the ranking of the router, and differ in what the router knows about a request; `round-robin`
takes the replicas in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deploy.bench.arguments import number, whole
from deploy.bench.fleet.costs import MACHINES, measure, read
from deploy.bench.fleet.figures import Objective, figures_of
from deploy.bench.fleet.policies import POLICIES
from deploy.bench.fleet.simulate import Failure, Plan, simulate
from deploy.bench.fleet.traces import TRACES, Arrival, Shape
from deploy.bench.fleet.transfers import Network
from deploy.bench.measure import Figure, report
from deploy.ray.scaling import TARGET_REQUESTS

MOST_REQUESTS, MOST_TOKENS = 2_000_000, 1_000_000_000  # largest numbers of requests and of prompt tokens in a trace
FAIL_S = 60.0  # seconds for which replicas that fail are away, by default
PREFILL_TOKENS, PATIENCE_S = 2048, 2.0  # defaults of options


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(_measured(options.model)))
        return
    if not options.simulate:
        parser.error("say --simulate, or --measure; `python -m tests.lab ray-fleet` in a checkout measures a real fleet")
    try:
        costs = (MACHINES.get(options.costs) or read(Path(options.costs))).slower(options.slowdown)
        if options.capacity:
            costs = replace(costs, capacity=options.capacity)
        shape = Shape(options.rate, options.minutes * 60, options.prompt, options.new, options.seed)
        if shape.num_requests > MOST_REQUESTS:
            raise ValueError(f"--rate and --minutes make {shape.num_requests} requests; expected at most {MOST_REQUESTS}")
        if shape.num_requests * shape.num_prompt > MOST_TOKENS:
            raise ValueError(f"--rate, --minutes and --prompt make more than {MOST_TOKENS} tokens of prompts; make one of them smaller")
        if options.most_replicas and options.most_replicas < options.replicas:
            raise ValueError(f"--most-replicas is {options.most_replicas}; expected at least --replicas, {options.replicas}")
        _require_partners(options)
        prefill_tokens, patience = options.prefill_tokens or PREFILL_TOKENS, options.patience or PATIENCE_S
        network = None if options.network is None else Network(options.network, prefill_tokens, patience)
        if options.prefill_replicas and network is None:
            raise ValueError(f"--prefill-replicas is {options.prefill_replicas}, and --network is not set; say how fast pages travel")
        if network is not None and not costs.token_bytes:
            raise ValueError("--network is set, and --costs has no token_bytes; measure the costs again")
        failures = _failures(options, shape)
    except ValueError as error:
        parser.error(str(error))
    trace = TRACES[options.trace](shape)
    objective = Objective(options.first, options.token)
    policies = POLICIES if options.policy == "all" else (options.policy,)
    figures = [
        figure if len(policies) == 1 else _named(policy, figure)
        for policy in policies
        for figure in _run(
            Plan(
                costs,
                options.cells,
                options.replicas,
                options.most_replicas,
                options.target_requests or TARGET_REQUESTS,
                policy,
                options.queue,
                failures,
                network=network,
                num_prefill=options.prefill_replicas,
            ),
            trace,
            objective,
            options.price,
        )
    ]
    report(figures, as_json=options.json)


def _run(plan: Plan, trace: Sequence[Arrival], objective: Objective, price: float) -> list[Figure]:
    return figures_of(simulate(plan, trace), objective, price)


def _named(policy: str, figure: Figure) -> Figure:
    """Return the figure with the policy before its name."""
    return Figure(f"{policy}: {figure.name}", figure.value, figure.unit, figure.goal, figure.at_least, figure.note)


def _require_partners(options: argparse.Namespace) -> None:
    """Raise ValueError if an option is set that has no effect without another option, and this other option is not set."""
    partners = {"prefill_tokens": "network", "patience": "network", "target_requests": "most_replicas", "fail_s": "fail"}
    for name, partner in partners.items():
        if getattr(options, name) is not None and not getattr(options, partner):
            flag, missing = (f"--{option.replace('_', '-')}" for option in (name, partner))
            raise ValueError(f"{flag} is {getattr(options, name):g}, and {missing} is not set; set both, or leave {flag} out")


def _failures(options: argparse.Namespace, shape: Shape) -> tuple[Failure, ...]:
    """Return the failures that the options ask for, all in the middle of the trace. Raise ValueError if there is no cell of a given number,
    or if a cell has fewer replicas than are to fail."""
    if options.fail_replicas is not None and not options.fail:
        raise ValueError(f"--fail-replicas is {options.fail_replicas}, and --fail is not set; say which cells fail")
    most = max(options.replicas, options.most_replicas)
    if (options.fail_replicas or 0) > most:
        raise ValueError(f"--fail-replicas is {options.fail_replicas}; expected at most {most}, the replicas of a cell")
    for cell in options.fail:
        if not 0 <= cell < options.cells:
            raise ValueError(f"--fail is {cell}; expected a cell from 0 to {options.cells - 1}")
    return tuple(Failure(shape.duration_s / 2, options.fail_s or FAIL_S, cell, options.fail_replicas or most) for cell in options.fail)


def _measured(model: str) -> dict[str, object]:
    """Load a model and measure its costs. End the program with a message if the model generates no tokens."""
    from deploy.bench.checkpoint import model_folder
    from deploy.model_loading.load import load_model
    from server.messages import Load

    with model_folder(model) as folder:
        loaded = load_model(Load("bench", str(folder)), lambda _stage, _fraction: None)
        if loaded.step_model is None or not loaded.step_model.limits.generates:
            raise SystemExit(f"--model is {model}, which generates no tokens; name one that does")
        return asdict(measure(loaded.step_model))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relaxserve bench fleet", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--simulate", action="store_true", help="simulate a fleet")
    either.add_argument("--measure", action="store_true", help="measure the steps of --model, and print them for --costs")
    parser.add_argument("--model", default="demo", help="the model that --measure measures")
    parser.add_argument("--costs", default="smollm2-core", help=f"a file that --measure wrote, or one of {', '.join(MACHINES)}")
    parser.add_argument(
        "--slowdown", type=number, default=1.0, help="how many times as long as measured a step takes, if a machine is shared"
    )
    parser.add_argument("--capacity", type=whole, help="tokens whose pages fit into the memory of a replica; those of --costs by default")
    parser.add_argument("--trace", choices=sorted(TRACES), default="poisson")
    parser.add_argument("--rate", type=number, default=2.0, help="requests per second, on average")
    parser.add_argument("--minutes", type=number, default=10.0)
    parser.add_argument("--prompt", type=whole, default=128, help="tokens of a prompt, on average; of a session's request: those it adds")
    parser.add_argument("--new", type=whole, default=64, help="tokens of an answer, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=whole, default=1, help="groups of replicas, each with a router of its own")
    parser.add_argument("--replicas", type=whole, default=2, help="replicas of each cell")
    parser.add_argument("--most-replicas", type=whole, default=0, help="replicas of each cell at most; their number then follows the load")
    parser.add_argument(
        "--target-requests",
        type=number,
        help=f"requests of each replica that --most-replicas aims at; {TARGET_REQUESTS:g} by default",
    )
    parser.add_argument(
        "--network", type=number, help="bytes per second at which replicas give each other pages; they give none by default"
    )
    parser.add_argument("--prefill-replicas", type=whole, default=0, help="further replicas of each cell, which only compute long prompts")
    parser.add_argument(
        "--prefill-tokens", type=whole, help=f"least number of new prompt tokens that they compute; {PREFILL_TOKENS} by default"
    )
    parser.add_argument(
        "--patience",
        type=number,
        help=f"seconds for which a request waits for pages beyond the time of computing them; {PATIENCE_S:g} by default",
    )
    parser.add_argument("--policy", choices=("all", *POLICIES), default="prefix")
    parser.add_argument("--queue", type=whole, default=128, help="requests of its least loaded replica at which a cell is full")
    parser.add_argument("--fail", type=int, nargs="*", default=[], metavar="CELL", help="cells that fail in the middle of the trace")
    parser.add_argument("--fail-replicas", type=whole, help="number of replicas of each such cell that fail; all by default")
    parser.add_argument("--fail-s", type=number, help=f"seconds for which these replicas are away; {FAIL_S:g} by default")
    parser.add_argument("--first", type=number, default=1.0, help="the objective: seconds to the first token")
    parser.add_argument("--token", type=number, default=0.1, help="the objective: seconds per further token")
    parser.add_argument("--price", type=number, default=1.0, help="price of a replica for an hour")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
