"""A teacher: another model, on the same or another server, whose probabilities a student learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_lightning.client import connect
from tinker_lightning.errors import InvalidDatum, InvalidInput, ModelNotFound
from tinker_lightning.recipes.references import References, sequence_of
from tinker_lightning.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.remote.lm import RemoteLM
    from tinker_lightning.types import Datum


class Teacher(References):
    """Requests the log-probabilities of a teacher without waiting for them.

    Args:
        lm: The student.
        tokenizer: Returns the tokenizer of the student.
        teacher: The name of a base model, the `tinker://` path of saved sampler weights, or a sampling client.
        url: The URL of the teacher's server; by default that of the student.
        api_key: The API key of the teacher's server.
    """

    def __init__(
        self, lm: RemoteLM, tokenizer: Callable[[], Any], teacher: Any, url: str | None, api_key: str | None
    ) -> None:
        super().__init__(lm, str(teacher), None, keep=False)
        if isinstance(teacher, str) and not teacher:
            raise InvalidInput("teacher must be the name of a base model, a tinker:// path or a sampling client")
        if url is not None and not isinstance(teacher, str):
            raise InvalidInput("a sampling client has a server already; leave teacher_url out")
        self._tokenizer = tokenizer
        self._teacher = teacher
        self._url = url
        self._api_key = api_key
        self._service: ServiceClient | None = None
        self._top: dict[bytes, tuple[Any, Any]] = {}

    def open(self) -> tuple[str, Any]:
        """Returns the name of the teacher and a client that samples from it, created once."""
        if self._opened is None:
            client = self._client()
            try:
                theirs = client.get_tokenizer().get_vocab()
            except ModelNotFound:  # some servers do not name a tokenizer
                theirs = None
            if theirs is not None and theirs != self._tokenizer().get_vocab():
                raise InvalidInput(
                    "the teacher has another vocabulary than the student, so their probabilities cannot be compared "
                    "token by token. Choose a teacher of the same family, or train on its texts with SFT."
                )
            self._opened = str(self._teacher), client
        return self._opened

    def close(self) -> None:
        """Ends the session with the teacher's server, if it was opened here."""
        service, self._service = self._service, None
        if service is not None:
            service.close()

    def top_targets(self, data: Sequence[Datum], k: int) -> list[tuple[Any, Any]]:
        """Returns the teacher's k most likely tokens at each target of each datum, `[T, K]`, and their logprobs.

        All requests are sent before the first answer is waited for; a sequence that was seen before is not sent again.
        """
        client, sampling = self.open()[1], SamplingParams(max_tokens=1)
        keys = [self._key(datum) for datum in data]
        pending = {}
        for key, datum in zip(keys, data, strict=True):
            if key not in self._top and key not in pending:
                tokens = sequence_of(datum)
                pending[key] = client.sample(ModelInput.from_ints(tokens), 1, sampling, topk_prompt_logprobs=k)
                self._lm.handle.remote.tokens.prefilled += len(tokens)
        for key, future in pending.items():
            rows = (future.result().topk_prompt_logprobs or [])[1:]  # nothing precedes the first token
            if not rows or any(row is None for row in rows):
                raise InvalidDatum("the teacher's server did not return the most likely tokens of the prompt")
            array = np.array(rows, np.float64)
            self._top[key] = array[..., 0].astype(np.int64), array[..., 1].astype(np.float32)
        return [self._top[key] for key in keys]

    def _client(self) -> Any:
        teacher = self._teacher
        if not isinstance(teacher, str):
            return teacher
        is_path = teacher.startswith("tinker://")
        if self._url is not None:
            self._service = connect(self._url, api_key=self._api_key)
            return self._service.create_sampling_client(*((teacher,) if is_path else (None, teacher)))
        backend = self._lm.backend
        return backend.create_sampling_client(teacher) if is_path else backend.create_base_sampling_client(teacher)
