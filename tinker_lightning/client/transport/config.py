"""The server's settings for its clients, and its extensions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The response of `client/config`; every flag is optional, and unknown ones are ignored."""

    pjwt_auth_enabled: bool = False
    proto_compress_fwdbwd: bool = False
    # The server runs a model's requests by number, so they may arrive in any order. Otherwise they are posted one after
    # another.
    parallel_fwdbwd_chunks: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    billing_exception_max_pause_duration_sec: float = 3600.0
    # The server runs uploaded per-datum losses; otherwise they are computed locally.
    custom_loss_server_side: bool = False


@dataclass(frozen=True, slots=True)
class Extensions:
    """The extensions that a server announces with its capabilities."""

    # A pass can leave out the log-probabilities that its built-in loss does not depend on.
    counted_logprobs: bool = False
    # Forwards can be kept for a backward that sends their gradient only.
    retained_forwards: bool = False
    # Whole-batch losses can be registered by name, and a pass may have batch inputs and a scale.
    server_losses: bool = False
    # The response to a submission may be the result itself: one round trip for an operation.
    submit_and_wait: bool = False
    # The server offers the files of its tokenizers.
    tokenizer_files: bool = False
    # A PEFT adapter can be uploaded as a checkpoint.
    import_adapter: bool = False
