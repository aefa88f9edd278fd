"""The errors of weight synchronisation: one tree, each class saying when it is raised."""

__all__ = [
    "BaseVersionError",
    "ConfigurationError",
    "CorruptFileError",
    "DeadlineError",
    "DigestError",
    "EncodingError",
    "FencedError",
    "LayoutError",
    "PeerLostError",
    "PlanError",
    "PlanTooLargeError",
    "ProtocolError",
    "QuorumError",
    "StorageError",
    "StorageFullError",
    "TopologyError",
    "TransferError",
    "TransportUnavailableError",
    "UncoveredRegionError",
    "UnknownTensorError",
    "VersionError",
    "VersionGoneError",
    "WeightSyncError",
]


class WeightSyncError(Exception):
    """Any failure of this library; the weights in use before it are still in use after it."""


class ConfigurationError(WeightSyncError):
    """A sender or receiver was asked for something that cannot work; raised on construction."""


class LayoutError(WeightSyncError):
    """A description of shards contradicts itself or the tensors it describes."""


class EncodingError(WeightSyncError):
    """A tensor cannot be encoded: its values have no scale, or shards cut a block apart."""


class TopologyError(WeightSyncError):
    """A description of hosts, devices, rails and links contradicts itself or the layouts."""


class PlanError(WeightSyncError):
    """No transfer plan exists between these two layouts."""


class PlanTooLargeError(PlanError):
    """A plan would take more memory than there is."""


class UnknownTensorError(PlanError):
    """A receiver asks for a tensor that no sender has, or that has another global shape."""


class UncoveredRegionError(PlanError):
    """A receiver asks for a region of a tensor of which the senders offer only a part."""


class TransferError(WeightSyncError):
    """A version could not be moved; nothing of it is in use."""


class TransportUnavailableError(TransferError):
    """This machine, platform or pair of processes cannot use the transport asked for."""


class PeerLostError(TransferError):
    """The other side closed its end or died."""


class DeadlineError(TransferError):
    """The other side did not answer in time."""


class ProtocolError(TransferError):
    """The other side speaks another protocol, refused the token, or sent nonsense."""


class DigestError(TransferError):
    """Bytes arrived that are not the bytes that were sent, or published."""


class StorageError(TransferError):
    """A file or object cannot be read, written, renamed or removed."""


class StorageFullError(StorageError):
    """The disk, the quota or the store has no room for what is being written."""


class CorruptFileError(StorageError):
    """A file is truncated, damaged or not of the format it should have."""


class VersionError(WeightSyncError):
    """A version is no whole number or out of order: published twice, committed without `stage`."""


class VersionGoneError(VersionError):
    """A holder has overwritten or given up a version that somebody still wants from it."""


class FencedError(VersionError):
    """The weights of an in-place receiver are in between two versions and must not be used."""


class QuorumError(VersionError):
    """The receivers of a group will not commit a version together; each keeps what it has."""


class BaseVersionError(VersionError):
    """Changes were asked for since bytes that are not those of the version they are called."""
