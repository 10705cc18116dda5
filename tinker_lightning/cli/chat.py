"""`tinker-lightning chat`: talks to a base model or to trained weights in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tinker_lightning.cli.sources import Source, add_server_options

if TYPE_CHECKING:
    import argparse

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.client.sampling import SamplingClient

_USAGE = "Type a message. /reset starts a new chat, /quit or Ctrl-D ends."


def add_to(commands: Any) -> None:
    """Adds the sub-command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talks to a model in the terminal, or answers the lines of standard input as one chat. " + _USAGE,
    )
    parser.add_argument(
        "source",
        metavar="MODEL",
        help="a base model, a checkpoint file of Lightning, a tinker:// path, or a PEFT folder",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="maximum length of an answer")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: 0.7)")
    parser.add_argument("--seed", type=int, metavar="N", help="make the answers reproducible")
    add_server_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers messages until the input ends; returns the exit code."""
    from tinker_lightning.client import connect
    from tinker_lightning.lightning.rows import RowFormat
    from tinker_lightning.types import SamplingParams

    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    source = Source.parse(options.source)
    with connect(options.base_url or source.base_url, api_key=options.api_key) as service:
        sampler = _sampler(service, source)
        tokenizer = sampler.get_tokenizer()
        rows, messages = RowFormat(tokenizer, system=options.system), list[dict[str, str]]()
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(_USAGE)
        while True:
            try:
                text = input("> " if is_terminal else "").strip()
            except EOFError:
                return 0
            if text == "/quit":
                return 0
            if text == "/reset":
                messages.clear()
            elif text:
                messages.append({"role": "user", "content": text})
                response = sampler.sample(rows.prompt(messages), 1, params).result()
                answer = tokenizer.decode(response.sequences[0].tokens, skip_special_tokens=True).strip()
                messages.append({"role": "assistant", "content": answer})
                print(answer, flush=True)


def _sampler(service: ServiceClient, source: Source) -> SamplingClient:
    if source.base_model is not None:
        return service.create_sampling_client(base_model=source.base_model)
    if source.path is not None and "/sampler_weights/" in source.path:
        return service.create_sampling_client(model_path=source.path)
    return source.training_client(service).save_weights_and_get_sampling_client()
