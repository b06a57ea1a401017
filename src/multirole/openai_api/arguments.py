"""The options of a command line that serves models. Nothing heavy is imported, so that help is quick."""

import argparse

from multirole.access import API_KEY


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --model, --host, --port, --ignore and --trust-remote-code."""
    model = "the base model's folder or name on the Hub, where the adapters were trained on a local one or name none"
    parser.add_argument("--model", help=model)
    host = f"address to listen on (default: this machine only); one that others can reach needs a key in {API_KEY}"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000; 0 takes a free one)")
    ignore = "a field of requests that is dropped instead of refused, such as response_format; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="FIELD", help=ignore)
    trust = "run the code that the base's folder or repository brings, as `trust_remote_code=True` did in training"
    parser.add_argument("--trust-remote-code", action="store_true", help=trust)
