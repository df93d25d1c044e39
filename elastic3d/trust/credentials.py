"""The credentials of a process of a run: the run's secret, and the process's id."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The run's secret as 64 hexadecimal digits, and the identity of this process: `Node.id`, name@incarnation.

    certificate, key: paths of PEM files with which tile servers encrypt, and clients expect them to; "" for neither.
    Never shown: not in a repr, not in the environment, not in events.
    """

    secret: str = field(repr=False)
    id: str
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if len(self.secret) != 2 * SECRET_BYTES or len(self.secret_bytes) != SECRET_BYTES:
            raise ValueError(f"the secret of a run is {SECRET_BYTES} bytes in hexadecimal digits")

    @property
    def secret_bytes(self) -> bytes:
        """The secret as bytes; ValueError if it is not one."""
        try:
            return bytes.fromhex(self.secret)
        except ValueError:
            # The message of the error itself would show the digits.
            raise ValueError("the secret of a run is hexadecimal digits") from None

    def of(self, id: str) -> Credentials:
        """Return the credentials of another incarnation of the same process."""
        return replace(self, id=id)
