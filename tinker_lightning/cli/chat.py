"""`tinker-lightning chat`: talks to a base model or to trained weights in the terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinker_lightning.cli.sources import Source, add_server_options
from tinker_lightning.errors import TooLong
from tinker_lightning.types import ModelInput

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.client.sampling import SamplingClient
    from tinker_lightning.rows.formats import RowFormat
    from tinker_lightning.types import SamplingParams

_USAGE = "Type a message. Ctrl-C stops an answer, /reset starts a new chat, /quit or Ctrl-D ends."
# Short at first, so that an answer begins at once; longer ones process the prompt less often.
_CHUNKS = [4, 8, 16, 32]
# Control characters in an answer would move the cursor, or change the terminal.
_UNPRINTED = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


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
        help="a base model, a checkpoint file of Lightning, the folder of a run, a tinker:// path, or a PEFT folder",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="maximum length of an answer")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: 0.7)")
    parser.add_argument("--seed", type=int, metavar="N", help="make the answers reproducible")
    add_server_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers messages until the input ends; returns the exit code."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"Loading {options.source} ...", file=sys.stderr)
        with contextlib.suppress(ImportError):  # not on Windows
            import readline  # noqa: F401 which lets `input` edit the line
    from tinker_lightning.client import connect
    from tinker_lightning.rows.formats import RowFormat
    from tinker_lightning.types import SamplingParams

    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    source = Source.parse(options.source)
    with connect(options.base_url or source.base_url, api_key=options.api_key) as service:
        sampler = _sampler(service, source)
        rows = RowFormat(sampler.get_tokenizer(), system=options.system)
        chat = _Chat(sampler, rows, params, _context_length(service, sampler))
        if is_terminal:
            print(_USAGE)
        while True:
            try:
                text = input("> " if is_terminal else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print("\n/quit or Ctrl-D ends.")
                continue
            if text == "/quit":
                return 0
            if text == "/reset":
                chat.messages.clear()
            elif is_terminal and text in ("/help", "/exit", "/?"):
                print(_USAGE)
            elif text:
                try:
                    chat.answer(text)
                except TooLong as error:
                    if not is_terminal:
                        raise
                    print(f"tinker-lightning: {error}", file=sys.stderr)


class _Chat:
    """The messages of a chat, and the model that answers."""

    def __init__(
        self, sampler: SamplingClient, rows: RowFormat, params: SamplingParams, context_length: int | None
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._sampler = sampler
        self._rows = rows
        self._params = params
        self._context_length = context_length

    def answer(self, text: str) -> None:
        """Prints the answer to a message, in a terminal while it is sampled. Ctrl-C ends the answer."""
        self.messages.append({"role": "user", "content": text})
        tokens: list[int] = []
        shown = ""
        try:
            prompt, params = self._within_context()
            chunks = _CHUNKS if sys.stdout.isatty() else [params.max_tokens or 0]
            for chunk in stream_answer(self._sampler, prompt, params, chunks):
                tokens += chunk
                # A character of several tokens is shown when it is complete.
                answer = self._decode(tokens).removesuffix("\N{REPLACEMENT CHARACTER}").lstrip()
                if answer.startswith(shown):
                    self._print(answer[len(shown) :], end="")
                    shown = answer
        except KeyboardInterrupt:
            print(" …", end="")
        except BaseException:
            self.messages.pop()
            raise
        answer = self._decode(tokens).strip()
        self._print(answer[len(shown) :] if answer.startswith(shown) else "")
        self.messages.append({"role": "assistant", "content": answer})

    @staticmethod
    def _print(text: str, end: str = "\n") -> None:
        print(text.translate(_UNPRINTED) if sys.stdout.isatty() else text, end=end, flush=True)

    def _within_context(self) -> tuple[ModelInput, SamplingParams]:
        """Returns the prompt, without the oldest turns of a chat that leaves no room for an answer."""
        prompt, wanted, dropped = self._rows.prompt(self.messages), self._params.max_tokens or 0, 0
        if self._context_length is None:
            return prompt, self._params
        while prompt.length + wanted > self._context_length and len(self.messages) > 1:
            del self.messages[:2]  # a message and its answer
            dropped += 1
            prompt = self._rows.prompt(self.messages)
        if dropped:
            print(
                f"(the oldest {dropped} of {dropped + len(self.messages) // 2} earlier turns no longer fit into the "
                f"context of {self._context_length} tokens, and were dropped)",
                file=sys.stderr,
            )
        left = self._context_length - prompt.length
        if left < 1:
            raise TooLong(
                f"the message has {prompt.length} tokens with its chat template, but the context of the model has "
                f"{self._context_length}, and the answer needs some of them. Send a shorter message."
            )
        return prompt, replace(self._params, max_tokens=min(wanted, left))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._rows.tokenizer.decode(tokens, skip_special_tokens=True))


def stream_answer(
    sampler: SamplingClient, prompt: ModelInput, params: SamplingParams, lengths: Iterable[int]
) -> Iterator[list[int]]:
    """Yields an answer in chunks, each of which continues the prompt and the chunks before it.

    The protocol returns a sample when it is complete, so chunks are how to show an answer while it is sampled. Their
    lengths do not depend on the time, so that a seed gives the same answer again.

    Args:
        sampler: The model.
        prompt: The prompt.
        params: The sampling parameters; `max_tokens` is the length of the whole answer.
        lengths: The maximum number of tokens of each chunk; the last one is repeated.
    """
    chunks, tokens = list(lengths), prompt.to_ints()
    left = params.max_tokens or 0
    for i, length in enumerate(itertools.chain(chunks, itertools.repeat(chunks[-1]))):
        # Another seed for each chunk, which would otherwise draw the same numbers.
        seed = None if params.seed is None else params.seed + i
        step = replace(params, max_tokens=min(length, left), seed=seed)
        (sequence,) = sampler.sample(ModelInput.from_ints(tokens), 1, step).result().sequences
        yield sequence.tokens
        left -= len(sequence.tokens)
        if sequence.stop_reason == "stop" or not left:
            return
        tokens = [*tokens, *sequence.tokens]


def _context_length(service: ServiceClient, sampler: SamplingClient) -> int | None:
    """Returns the context length of the model, prompt and answer together; None if the server does not report it."""
    name = sampler.get_base_model()
    models = service.get_server_capabilities().supported_models
    return next((model.max_context_length for model in models if model.model_name == name), None)


def _sampler(service: ServiceClient, source: Source) -> SamplingClient:
    if source.base_model is not None:
        return service.create_sampling_client(base_model=source.base_model)
    if source.path is not None and "/sampler_weights/" in source.path:
        return service.create_sampling_client(model_path=source.path)
    return source.training_client(service).save_weights_and_get_sampling_client()
