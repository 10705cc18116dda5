"""A check of the deletion of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_lightning.doctor.check import Check, Finding, NotOffered
from tinker_lightning.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from tinker_lightning.doctor.probe import Probe


def _deletion(probe: Probe) -> Finding:
    client = probe.model()
    path = probe.save(client)
    try:
        client.delete_checkpoint(path)
    except (Unsupported, InvalidInput) as error:  # there is no endpoint, or paths are not those of the protocol
        raise NotOffered("states stay on the server", deletes_checkpoints=False) from error
    if client.checkpoint_exists(path):
        return Finding("a deleted checkpoint is still there", dialect={"deletes_checkpoints": False})
    probe.forget(path)
    return Finding(dialect={"deletes_checkpoints": True})


DELETION = Check(
    "deletion",
    "a checkpoint can be deleted",
    "States stay on the server, also those of ModelCheckpoint(save_top_k=...). Delete them there.",
    _deletion,
)
