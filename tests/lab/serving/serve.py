"""`python -m tests.lab serve`: measure what `relaxserve bench serve` measures. With `--peer`, also measure other servers with the same
weights under a burst of requests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from deploy.bench.checkpoint import model_folder
from deploy.bench.measure import Figure, report
from deploy.bench.serving.serve import JUDGED_CLIENTS, Texts, judged, measure, options_of, parsed, spec_of, stream_figures, throughput
from deploy.model_loading.files import open_files
from deploy.model_loading.locate import locate
from deploy.served import served
from deploy.streams import OverHttp, Stream
from server.models.state import ModelSpec
from tests.lab.serving.peer_servers import PEER_SERVERS, Weights, check, peer_served


def peer_figures(spec: ModelSpec, peers: Sequence[str], temperature: float, num_clients: int, length: int) -> list[Figure]:
    """Compare this server and its peers under a burst of requests over HTTP."""
    files = open_files(locate(spec.source))
    weights = Weights(spec.name, Path(spec.source), files.config, files.weights, spec.quantize)
    texts = Texts(files.config.vocab_size, length)

    def burst(url: str) -> list[Stream]:
        driver = OverHttp(url, spec.name, temperature=temperature)
        driver.run(texts.several(0, 1, num_new=8))
        return driver.run(texts.several(num_clients, num_clients))

    with served(spec) as url:
        own = burst(url)
    figures = stream_figures(f"burst of {num_clients} over HTTP", own)
    for peer in peers:
        with peer_served(peer, weights, num_clients) as url:
            other = burst(url)
        name = f"burst of {num_clients}, {peer} over HTTP"
        figures += stream_figures(name, other)
        first = [statistics.median(stream.ttft_s for stream in streams) for streams in (own, other)]
        figures.append(Figure(f"{name}: our throughput / the peer's", throughput(own) / throughput(other), "", 3.0, True))
        figures.append(Figure(f"{name}: our median time to first token / the peer's", first[0] / first[1], "", 0.3))
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = options_of("python -m tests.lab serve", __doc__)
    parser.add_argument(
        "--peer", action="append", default=[], choices=PEER_SERVERS, help="another server, with the same weights; repeatable"
    )
    options = parsed(parser, argv)
    for peer in options.peer:
        check(peer, options.quantize)
    with model_folder(options.model) as folder:
        figures = measure(folder, options)
        if options.peer:
            figures += peer_figures(
                spec_of(folder, options), options.peer, options.temperature, options.burst or JUDGED_CLIENTS, options.length
            )
    report(judged(figures, options), as_json=options.json)


if __name__ == "__main__":
    main()
