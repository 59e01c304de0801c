"""Every error asyncrl raises on purpose.

One base class; each error is also its stdlib kin, so `except ValueError` works for a caller who does
not know this package. A message says what, got, expected, and the config key to change.
"""


class AsyncRLError(Exception):
    """Base of all errors raised by asyncrl."""


class ConfigError(AsyncRLError, ValueError):
    """A setting, a data file or a model path is wrong; nothing was started."""


class ProtocolError(AsyncRLError, ValueError):
    """A message breaks the wire schema or its order, or a handshake was refused."""


class RefusedError(ProtocolError):
    """The broker sent Refuse, as to a peer of another run or with other settings; its reason says all."""


class StaleRolloutError(AsyncRLError, RuntimeError):
    """A token older than k versions reached the learner, or a group was admitted without credit."""


class WeightMismatchError(AsyncRLError, ValueError):
    """Published weights do not fit the receiving model, or their digest is wrong."""


class PeerLostError(AsyncRLError, ConnectionError):
    """The other side stopped answering within its deadline, or a child process died."""


class DeviceError(AsyncRLError, RuntimeError):
    """A kernel failed on the GPU: this process is lost, while another try may well succeed."""


class NoProgressError(AsyncRLError, TimeoutError):
    """Nothing was trained within `pipeline.no_progress_s`."""


class NonFiniteLossError(AsyncRLError, ArithmeticError):
    """Too many optimizer steps in a row had a loss or gradient that is not finite."""


class AlertError(AsyncRLError, RuntimeError):
    """A metric left its healthy range and `telemetry.alerts="stop"`."""


class CheckpointError(AsyncRLError, OSError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


MAX_LINE_CHARS = 500


def in_a_line(error: BaseException) -> str:
    """Type and message, fit for a log line or another process: cut at 500 characters, valid UTF-8."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.encode("utf-8", "replace").decode()[:MAX_LINE_CHARS]
