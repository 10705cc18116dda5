"""The session of a module with a server: the remote model, the client that trains it, and the one that samples."""

from __future__ import annotations

import inspect
import io
import os
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from tinker_lightning.client import connect, models
from tinker_lightning.errors import ClientClosed, InvalidInput, NotFound, TinkerLightningError
from tinker_lightning.lightning import _compat, hyperparameters
from tinker_lightning.lightning.checkpoint import files
from tinker_lightning.remote.calls import tokens_of
from tinker_lightning.remote.lm import RemoteLM
from tinker_lightning.rows.batches import except_datums, prompts_of
from tinker_lightning.rows.formats import RowFormat
from tinker_lightning.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from tinker_lightning.client import ServiceClient
    from tinker_lightning.remote.saved_state import SavedState
    from tinker_lightning.remote.window import RemoteModel
    from tinker_lightning.types import WeightsInfoResponse

# Lightning's `classmethod` that raises if it is called on an instance, whose weights it would not change.
if TYPE_CHECKING:
    _classmethod = classmethod
else:
    _classmethod = type(inspect.getattr_static(pl.LightningModule, "load_from_checkpoint"))

# How many seconds a run that is ending waits for the server.
LAST_WAIT = 2.0


class WaitTerminated(SIGTERMException):
    """A wait that was ended some seconds after a SIGTERM."""


class SessionModule(pl.LightningModule):
    """A `LightningModule` with a model on a server, and the session that it belongs to.

    Args:
        model: The name of a base model, or a training client of any SDK.
        adapter: The settings of the adapter that a new model gets.
        base_url: The URL of the server.
        api_key: The API key of the server.
    """

    num_samples: int = 1
    """The number of continuations that `predict_step` samples of each prompt."""

    def __init__(self, model: Any, adapter: dict[str, Any], base_url: str | None, api_key: str | None) -> None:
        super().__init__()
        self._session = Session(model, adapter, base_url, api_key)
        self.lm = RemoteLM(self._session.client if model is None or isinstance(model, str) else model)
        self._session.remote = self.lm.handle.remote
        self._session.remote.load_state = self._session.load
        self._tokenizer: Any = None
        self._prompt_sampler = PromptSampler(self.lm, lambda: RowFormat(self.tokenizer))
        self._sampling_params = SamplingParams(max_tokens=64)

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer is attached."""
        return _compat.ATTACHED_TRAINER.get(self) is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, from the server; raises `ModelNotFound` if the server does not name one."""
        if self._tokenizer is None:
            self.check_open()
            self._tokenizer = self.lm.backend.get_tokenizer()
        return self._tokenizer

    @property
    def checkpoint_file(self) -> object:
        """The name of the file that the trainer loads, for errors."""
        return (self.trainer.ckpt_path if self.has_trainer else None) or "the checkpoint"

    def set_predict_options(self, options: Mapping[str, Any]) -> None:
        """Changes how `predict_step` samples; see `PredictOptions`. What a subclass overrides stays."""
        hyperparameters.check_keys(options)
        params = dict(options)
        num_samples = params.pop("num_samples", self.num_samples)
        if num_samples < 1:
            raise InvalidInput(f"predict: num_samples must be at least 1, got {num_samples}")
        self.num_samples = num_samples
        self._sampling_params = replace(self._sampling_params, **params)

    def sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters of `predict_step`. Override it to compute them."""
        return self._sampling_params

    @override
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Samples a continuation of each prompt (text, chat, dict, datum, input or tokens) from the current weights.

        Returns one dict per prompt with `tokens`, `logprobs`, `stop_reason` and `text`. If `num_samples` is above 1, it
        describes the first sample, and has a list of all of them under `samples`.
        """
        return self._prompt_sampler.sample(batch, self.sampling_params(), self.num_samples)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves tensors to a device, but not datums and prompts, which are sent to the server."""
        move = super().transfer_batch_to_device
        return except_datums(batch, lambda part: move(part, device, dataloader_idx))

    # Lightning must not count it as an override: it warns about those if there is a data module.
    transfer_batch_to_device.__wrapped__ = pl.LightningModule.transfer_batch_to_device  # type: ignore[attr-defined]

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the model on the server and returns a state dict that names the saved state.

        While a trainer runs, a model that was not used yet is created, so that the run can resume from it.
        """
        trainer = self.trainer if self.has_trainer else None
        if trainer and trainer.lightning_module is self and trainer.state.status == TrainerStatus.RUNNING:
            _ = self.lm.backend
        return super().state_dict(*args, **kwargs)

    @_classmethod
    @override
    def load_from_checkpoint(
        cls,  # noqa: N805 for the decorator
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Creates a module from a checkpoint file, by its path, its URL, or opened for reading.

        Args:
            checkpoint_path: The file.
            map_location: The device of its tensors, as for `torch.load`.
            hparams_file: A file with hyperparameters that replace those of the checkpoint.
            strict: Whether the keys of the state dict must be those of the module.
            weights_only: False also rebuilds objects, which can run any code. None means True for every kind of file.
            **kwargs: Constructor arguments that the file does not have, or that replace its own.

        Raises:
            FileNotFoundError: If there is no such file.
            InvalidInput: If the file is damaged, or contains anything but tensors and plain data.
        """
        load = super().load_from_checkpoint
        content: Any = files.read(checkpoint_path, map_location or "cpu", weights_only)
        if weights_only is not False:
            content = files.with_plain_arguments(content, cls, kwargs)
        elif "weights_only" in inspect.signature(load).parameters:  # otherwise Lightning 2.5, which rebuilds objects
            kwargs["weights_only"] = False
        copy = io.BytesIO()  # Lightning cannot load what was read already
        torch.save(content, copy)
        copy.seek(0)
        return load(copy, map_location, hparams_file, strict, **kwargs)

    def close(self) -> None:
        """Ends the session with the server if this module has opened it."""
        self._session.close()

    def check_open(self) -> None:
        """Raises `ClientClosed` after `close()` has ended the session."""
        self._session.check_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.close(kind, error, traceback)


class Session:
    """Creates the training client of a module at its first use, on a new model or from a saved state."""

    remote: RemoteModel  # the model of the client, whose optimizer is fixed at its creation

    def __init__(self, model: Any, settings: dict[str, Any], base_url: str | None, api_key: str | None) -> None:
        # Empty for a training client, which has a model already.
        base_model = os.environ.get("TINKER_BASE_MODEL", "") if model is None else model
        self.base_model = base_model if isinstance(base_model, str) else ""
        self.is_external = not isinstance(base_model, str)  # the user has passed the client
        self.resumes_from: str | None = None
        self._saved_in: str | None = None  # where that state was saved
        self._settings = settings
        self._base_url = base_url
        self._api_key = api_key
        self._service: ServiceClient | None = None
        self._is_closed = False

    def client(self) -> Any:
        """Creates a training client, from the state that `load` was called with, if any."""
        self.check_open()
        if not self.base_model:
            raise InvalidInput("there is no base model: pass one, for example SFT('tiny'), or set TINKER_BASE_MODEL")
        if self._service is None:
            self._service = connect(self._base_url, api_key=self._api_key)
        path, settings = self.resumes_from, dict(self._settings)
        if self.remote.optimizer_kind is not None:
            settings["optimizer"] = self.remote.optimizer_kind
        if path is None:
            return self._service.create_lora_training_client(self.base_model, **settings)
        with _explaining_missing(path, self._service, self._saved_in):
            _check_saved(path, self._service.weights_info(path), settings)
            if models.in_one_request(self._service.session.dialect):
                return self._service.create_training_client_from_state_with_optimizer(path, self.base_model)
            client = self._service.create_lora_training_client(self.base_model, **settings)
            client.load_state_with_optimizer(path).result()
            return client

    def check_open(self) -> None:
        """Raises `ClientClosed` after `close()`, unless the user has passed a client, which stays open."""
        if self._is_closed and not self.is_external:
            raise ClientClosed("this module was closed, and its model with it. Create a new module.")

    def load(self, state: SavedState) -> None:
        """Loads a saved state; a model that does not exist yet is created from it at the first use."""
        remote = self.remote
        exists = self.is_external or remote.is_created
        base_model: str | None = self.base_model
        rank = self._settings["rank"]
        if exists:
            info = remote.backend.get_info()
            base_model, rank = info.model_data.model_name, info.lora_rank
        for what, saved, current in (("base model", state.base_model, base_model), ("rank", state.rank, rank)):
            if saved and current and saved != current:
                raise InvalidInput(
                    f"the checkpoint has {what} {saved}, but this module has {what} {current}. Create the module with "
                    f"the {what} of the checkpoint."
                )
        if exists:
            with _explaining_missing(state.path, remote.backend, state.storage):
                remote.backend.load_state_with_optimizer(state.path).result()
        else:
            self.base_model = self.base_model or state.base_model or ""
            self.resumes_from, self._saved_in = state.path, state.storage

    def close(self, *failure: Any) -> None:
        """Closes the session if it was opened here; does not wait for requests after a `failure`, as in `__exit__`."""
        service, self._service = self._service, None
        self._is_closed = True
        if service is not None:
            service.__exit__(*(failure or (None, None, None)))


class PromptSampler:
    """Samples from a model with one sampling client per version of its weights."""

    def __init__(self, lm: RemoteLM, rows: Callable[[], RowFormat]) -> None:
        self._lm = lm
        self._rows = rows
        self._client: tuple[int, Any] | None = None  # with the version of the weights

    def sample(self, batch: Any, params: SamplingParams, num_samples: int = 1) -> list[dict[str, Any]]:
        """Returns a continuation of each prompt of a batch: `tokens`, `logprobs`, `stop_reason` and `text`.

        With several samples, which take one request per prompt, these are of the first, and `samples` has all of them.
        Without a tokenizer, which some servers do not name, prompts must be tokens, and there is no `text`.
        """
        client = self._current_client()
        prompts = prompts_of(batch, self._rows)
        futures = [client.sample(prompt, num_samples, params) for prompt in prompts]
        responses = [future.result() for future in futures]
        for prompt, response in zip(prompts, responses, strict=True):
            self._lm.handle.remote.tokens.add_samples(tokens_of([prompt]), response)
        try:
            tokenizer = self._rows().tokenizer
        except Exception as error:  # of transformers, of its hub, or of the server
            warnings.warn(f"predictions have no text, because there is no tokenizer: {error}", stacklevel=2)
            tokenizer = None
        predictions = []
        for response in responses:
            samples = [
                {
                    "tokens": one.tokens,
                    "logprobs": one.logprobs,
                    "stop_reason": one.stop_reason,
                    **({} if tokenizer is None else {"text": tokenizer.decode(one.tokens, skip_special_tokens=True)}),
                }
                for one in response.sequences
            ]
            predictions.append({**samples[0], "samples": samples} if num_samples > 1 else samples[0])
        return predictions

    def reset(self) -> None:
        """Drops the sampling client: a model that the user passed may have been trained elsewhere."""
        self._client = None

    def _current_client(self) -> Any:
        version, backend = self._lm.handle.remote.version, self._lm.backend
        if self._client is None or self._client[0] != version:
            self._client = version, backend.save_weights_and_get_sampling_client()
        return self._client[1]


def _check_saved(path: str, info: WeightsInfoResponse, settings: dict[str, Any]) -> None:
    """Raises `InvalidInput` if a state has another adapter or optimizer, as far as the server reports them."""
    if differ := models.differences(info, settings):
        theirs = ", ".join(f"{name}={value}" for name, value in differ.items())
        own = ", ".join(f"{name}={settings[name]}" for name in differ)
        raise InvalidInput(
            f"the remote state {path} that the checkpoint names has {theirs}, but this module has {own}. Create the "
            "module with the settings of the state."
        )


@contextmanager
def _explaining_missing(path: str, server: Any, saved_in: str | None) -> Iterator[None]:
    """Raises `NotFound` with the path of the state, and where it was saved, if loading fails because it is missing."""
    try:
        yield
    except (NotFound, InvalidInput) as error:  # which one depends on the server
        try:
            is_missing = not server.checkpoint_exists(path)
        except TinkerLightningError:  # not supported by some servers
            is_missing = isinstance(error, NotFound)
        if not is_missing:
            raise
        raise NotFound(
            f"the remote state {path} that the checkpoint names is not on the server: {error}. It was deleted or has "
            f"expired, or the module is connected to another server{_places(server.storage, saved_in)}. Resume from "
            "another checkpoint; the file itself was not changed."
        ) from error


def _places(searched: str, saved_in: str | None) -> str:
    """Returns where a state was searched, and where it was saved if that is another place."""
    if saved_in is None or saved_in == searched:
        return f": {searched} was searched"
    return f": it was saved in {saved_in}, and {searched} was searched"
