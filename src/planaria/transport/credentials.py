"""The token file of a job on several machines: a secret, and a certificate with its key.

Whoever has the file may be the head of the job or join it; `planaria token` makes it. Connections
between machines are TLS 1.3, and each end presents the one certificate of the file and accepts no
other. Over TLS both ends also prove by the handshake of frames.py that they know the secret, with a
key that is derived for the purpose of the connection, and for a node from the run as well. So a
proof for one purpose, or for one run, is worth nothing for another.

The file is JSON with the fields of `Credentials` and a version. Nobody but its owner may read it.
"""

import base64
import os
import secrets
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from planaria.errors import ConfigError
from planaria.transport.frames import LINK_CERTIFICATES, derive

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

FIELD: Final = "--token-file"
VARIABLE: Final = "PLANARIA_TOKEN_FILE"
_DEFAULT_PATH: Final = Path("~/.config/planaria/token")
_VERSION: Final = 1
_SECRET_BYTES: Final = 32
_FINGERPRINT_BYTES: Final = 8
_FILE_BYTES_MAX: Final = 1 << 16
_VALIDITY: Final = timedelta(days=3653)  # Ten years.
# No clock that is late makes the certificate invalid: a machine may start with a clock at 1970.
_FIRST_INSTANT: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_INSTANT: Final = datetime(9999, 12, 31, tzinfo=UTC)
_MAKE_ANEW: Final = "make a new file with `planaria token` and copy it to all machines"


class Credentials(msgspec.Struct, frozen=True):
    """The contents of a token file. Its text form shows none of them.

    Attributes:
        secret: random bytes from which the keys of all purposes are derived.
        certificate: self-signed certificate that both ends of a connection present, as PEM.
        key: private key of the certificate, as PEM.
    """

    secret: bytes
    certificate: str
    key: str

    def __repr__(self) -> str:
        """The name of the class: logs and tracebacks must not show a secret."""
        return "Credentials(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Nothing, for the same reason."""
        return []

    def derive(self, purpose: str) -> bytes:
        """The key for one purpose, 32 bytes; from it nobody learns the secret or another key."""
        return derive(self.secret, purpose)

    def certificate_bytes(self) -> bytes:
        """The certificate as DER."""
        return ssl.PEM_cert_to_DER_cert(self.certificate)

    def fingerprint(self) -> str:
        """A text that is the same on all machines that have the same file, and tells nothing."""
        whole = derive(self.secret, f"fingerprint {self.certificate} {self.key}")
        return whole[:_FINGERPRINT_BYTES].hex(":", 2)

    def first_instant(self) -> datetime:
        """The time from which the certificate is valid."""
        return _x509(self).not_valid_before_utc

    def last_instant(self) -> datetime:
        """The time until which the certificate is valid."""
        return _x509(self).not_valid_after_utc

    def server_context(self) -> ssl.SSLContext:
        """TLS for the end that accepts connections. It takes about 1 ms.

        Raises:
            ssl.SSLError: the certificate or the key is no such thing, or they are no pair.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # No session is resumed: each connection shows its certificate.
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS for the end that connects; see `server_context`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # The certificate is pinned, so names would add nothing.
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        # The ssl module reads keys from files only; this one exists in memory alone.
        descriptor = os.memfd_create("planaria-token", os.MFD_CLOEXEC)
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write((self.certificate + self.key).encode())
            context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
        finally:
            os.close(descriptor)
        return context


def credentials_of(data: bytes) -> Credentials | None:
    """The credentials in JSON, as a node's spec has them; None: b"", there are none."""
    return msgspec.json.decode(data, type=Credentials) if data else None


def make_credentials() -> Credentials:
    """A new secret and a new certificate, which is valid for ten years from now."""
    return credentials_between(_FIRST_INSTANT, datetime.now(UTC) + _VALIDITY)


def credentials_between(first: datetime, last: datetime) -> Credentials:
    """A new secret and a new certificate, which is valid between two instants."""
    # Imported here because it takes 0.1 s, which only `planaria token` has to pay.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return _credentials(
        secrets.token_bytes(_SECRET_BYTES),
        ec.generate_private_key(ec.SECP256R1()),
        hashes.SHA256(),
        name="planaria",
        serial_number=x509.random_serial_number(),
        validity=(first, last),
    )


def run_credentials(token: bytes) -> Credentials:
    """The secret and certificate of a run, which all that know its token derive alike.

    Key and signature are Ed25519, which needs no random numbers. The certificate is valid at any
    time: it is the token that ends with the run.
    """
    # Imported here for the same reason.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _credentials(
        token,
        Ed25519PrivateKey.from_private_bytes(derive(token, LINK_CERTIFICATES)),
        None,  # Ed25519 hashes by itself.
        name="planaria run",
        serial_number=1,
        validity=(_FIRST_INSTANT, _LAST_INSTANT),
    )


def _credentials(
    secret: bytes,
    key: "ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey",
    algorithm: "hashes.SHA256 | None",
    *,
    name: str,
    serial_number: int,
    validity: tuple[datetime, datetime],
) -> Credentials:
    """The secret with a certificate that its key has signed itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(serial_number)
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, algorithm)
    )
    return Credentials(
        secret=secret,
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode(),
    )


def _x509(credentials: Credentials) -> "x509.Certificate":
    # Imported here for the same reason.
    from cryptography import x509

    return x509.load_pem_x509_certificate(credentials.certificate.encode())


def token_path(option: str) -> Path:
    """The token file: the option's value, else $PLANARIA_TOKEN_FILE, else the default path."""
    return Path(option or os.environ.get(VARIABLE, "") or _DEFAULT_PATH).expanduser()


def write_credentials(path: Path) -> None:
    """Makes credentials and writes them to a new file that only its owner may read.

    Directories that do not exist are made.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    data = _encode(make_credentials())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        if not path.exists():  # A file stands where one of its directories should be.
            raise ConfigError("FILE", str(path), "cannot be written: Not a directory") from error
        remedy = "exists and may be in use; name a new file, or remove this one first"
        raise ConfigError("FILE", str(path), remedy) from error
    except OSError as error:
        raise ConfigError("FILE", str(path), f"cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # Half a file would stand in the way of the next try.
        path.unlink(missing_ok=True)
        raise ConfigError("FILE", str(path), f"cannot be written: {error.strerror}") from error


def read_credentials(path: Path) -> Credentials:
    """The credentials of a token file, which fit together and are valid now.

    Raises:
        ConfigError: there is no such file, others than its owner may read or write it, or it is no
            token file or an expired one.
    """
    credentials = _decode(path, _private_bytes(path))
    try:
        _try_handshake(credentials)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(FIELD, str(path), certificate_problem(credentials, error)) from error
    except (ssl.SSLError, ValueError) as error:
        remedy = f"holds a damaged certificate or key ({error}): {_MAKE_ANEW}"
        raise ConfigError(FIELD, str(path), remedy) from error
    return credentials


def certificate_problem(credentials: Credentials, error: ssl.SSLCertVerificationError) -> str:
    """The reason why this machine does not accept a certificate, and the remedy."""
    if error.verify_code not in (_NOT_YET_VALID, _EXPIRED):
        return "the other end has a certificate of another token file: copy one file to both"
    first, last = credentials.first_instant(), credentials.last_instant()
    return (
        f"the certificate of the token file is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d %H:%M}"
        f" UTC, and this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M}: set the clock if "
        f"it is wrong, else {_MAKE_ANEW}"
    )


# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_NOT_YET_VALID, _EXPIRED = 9, 10


class _TokenFile(msgspec.Struct, frozen=True):
    """The file; the secret is in base64."""

    version: int
    secret: str
    certificate: str
    key: str


def _encode(credentials: Credentials) -> bytes:
    file = _TokenFile(
        version=_VERSION,
        secret=base64.b64encode(credentials.secret).decode(),
        certificate=credentials.certificate,
        key=credentials.key,
    )
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def _decode(path: Path, data: bytes) -> Credentials:
    no_token_file = f"is no token file; {_MAKE_ANEW}"
    try:
        file = msgspec.json.decode(data, type=_TokenFile)
        secret = base64.b64decode(file.secret, validate=True)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(FIELD, str(path), no_token_file) from error
    if file.version != _VERSION:
        remedy = f"has version {file.version}, and this planaria reads {_VERSION}: {_MAKE_ANEW}"
        raise ConfigError(FIELD, str(path), remedy)
    texts = file.certificate + file.key
    if len(secret) != _SECRET_BYTES or not texts.isascii():
        raise ConfigError(FIELD, str(path), no_token_file)
    return Credentials(secret=secret, certificate=file.certificate, key=file.key)


def _private_bytes(path: Path) -> bytes:
    """The bytes of a file that nobody but its owner may read or write."""
    try:
        # Without O_NONBLOCK, a named pipe would be waited for until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        remedy = (
            f"cannot be read ({error.strerror}): make it once with `planaria token {path}`, copy "
            f"it to every machine, and name it with {FIELD} or ${VARIABLE}"
        )
        raise ConfigError(FIELD, str(path), remedy) from error
    if not stat.S_ISREG(mode) or len(data) > _FILE_BYTES_MAX:
        raise ConfigError(FIELD, str(path), f"is no token file; {_MAKE_ANEW}")
    if stat.S_IMODE(mode) & 0o077:
        remedy = (
            f"has mode {stat.S_IMODE(mode):04o}, so others than its owner may use it: "
            f"chmod 600 {path}; if others may have read it, {_MAKE_ANEW}"
        )
        raise ConfigError(FIELD, str(path), remedy)
    return data


def _try_handshake(credentials: Credentials) -> None:
    """Connects the credentials to themselves in memory, so that what is wrong shows early.

    Raises:
        ssl.SSLError: certificate and key do not work; SSLCertVerificationError: not at this time.
        ValueError: there is more than one certificate, or none.
    """
    credentials.certificate_bytes()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = credentials.server_context().wrap_bio(to_server, to_client, server_side=True)
    client = credentials.client_context().wrap_bio(to_client, to_server)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def _no_password() -> str:
    """Raises the error of an encrypted key instead of asking for a password at the terminal."""
    raise ValueError("the key is encrypted")
