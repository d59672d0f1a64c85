"""Where a queue server is: parsed from a URL, printed without its password.

    redis://[user:password@]host[:6379][/db]              rediss:// the same over TLS
    unix:///path/to/socket[?db=1]                         (also unix://user:password@/path)
    redis+sentinel://[user:password@]host[:26379],host[:26379]/service[/db]     rediss+sentinel:// over TLS

In the Sentinel form user and password are those of the queue server; the sentinels' own are the query's
`sentinel_username` and `sentinel_password`. TLS takes `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths)
and `ssl_cert_reqs` (required, none) from the query. Anything else in a query is refused: an option that does
nothing would be believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from gpulayer_broker.errors import BadSetting

FORMS = "redis://host:6379/0, rediss://host:6379/0, unix:///path/to/socket or redis+sentinel://host:26379/service/0"
REDIS_PORT = 6379
SENTINEL_PORT = 26379
SHOWN = 100
TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One queue server, or the sentinels that know it. Neither repr nor str shows a password."""

    host: str = ""
    port: int = REDIS_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: tuple[tuple[str, str], ...] = ()
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """The endpoint that a URL names; BadSetting with one line, which never holds the password."""
        try:
            return _parse(url.strip())
        except ValueError as error:
            shown = redacted(url)
            shown = shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 1]}…"
            raise BadSetting(f"queue address {shown!r}: {error}") from None

    @classmethod
    def unix(cls, path: str, db: int = 0) -> Endpoint:
        return cls(path=path, db=db)

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def url(self) -> str:
        """The URL that parses back to this endpoint, password included: never for a log."""
        return self._format(self.password, self.sentinel_password)

    def __str__(self) -> str:
        return self._format("***" if self.password else None, "***" if self.sentinel_password else None)

    def _format(self, password: str | None, sentinel_password: str | None) -> str:
        login = _login(self.username, password)
        if self.is_unix:
            query = f"?db={self.db}" if self.db else ""
            return f"unix://{login}{quote(self.path)}{query}"
        options = list(self.tls_options)
        if self.sentinel_username:
            options.append(("sentinel_username", self.sentinel_username))
        if sentinel_password:
            options.append(("sentinel_password", sentinel_password))
        query = "?" + urlencode(options, safe="*/") if options else ""
        scheme = "rediss" if self.tls else "redis"
        if self.sentinels:
            hosts = ",".join(_host_port(host, port) for host, port in self.sentinels)
            return f"{scheme}+sentinel://{login}{hosts}/{quote(self.service, safe='')}/{self.db}{query}"
        return f"{scheme}://{login}{_host_port(self.host, self.port)}/{self.db}{query}"


def redacted(url: str) -> str:
    """The URL without what could be a password, whether or not it parses."""
    head, separator, rest = url.partition("://")
    if not separator:
        return url if "@" not in url else "***@" + url.rpartition("@")[2]
    netloc_and_path, query_mark, _ = rest.partition("?")
    login, at, place = netloc_and_path.rpartition("@")
    user = login.partition(":")[0]
    shown = f"{user}:***@" if at else ""
    return f"{head}://{shown}{place}{'?…' if query_mark else ''}"


def _parse(url: str) -> Endpoint:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in {"redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel"}:
        raise ValueError(f"expected {FORMS}")
    parts = urlsplit(url)
    if parts.fragment:
        raise ValueError("has a '#'; write it as %23 when it belongs to the password")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    login, _, place = parts.netloc.rpartition("@")
    username, password = _split_login(login)
    if scheme == "unix":
        return _parse_unix(place, parts.path, username, password, options)
    tls = scheme.startswith("rediss")
    sentinel = scheme.endswith("+sentinel")
    _refuse_unknown(
        options, (TLS_OPTIONS if tls else frozenset()) | (SENTINEL_OPTIONS if sentinel else frozenset())
    )
    tls_options = tuple((name, value) for name, value in options.items() if name in TLS_OPTIONS)
    if not sentinel:
        host, port = _split_host(place, REDIS_PORT)
        db = _db(parts.path.strip("/"))
        return Endpoint(host, port, "", db, username, password, tls, tls_options)
    service, _, db_text = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("a Sentinel address ends in /service or /service/db")
    hosts = tuple(_split_host(item, SENTINEL_PORT) for item in place.split(","))
    return Endpoint(
        db=_db(db_text),
        username=username,
        password=password,
        tls=tls,
        tls_options=tls_options,
        sentinels=hosts,
        service=unquote(service),
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
    )


def _parse_unix(
    place: str, path: str, username: str | None, password: str | None, options: dict[str, str]
) -> Endpoint:
    if place or not path.startswith("/") or path == "/":
        raise ValueError("a socket's path is absolute: unix:///run/user/1000/queue.sock")
    _refuse_unknown(options, frozenset({"db"}))
    return Endpoint(path=unquote(path), db=_db(options.get("db", "")), username=username, password=password)


def _refuse_unknown(options: dict[str, str], known: frozenset[str]) -> None:
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {name!r}; known here: {', '.join(sorted(known)) or 'none'}")


def _split_login(login: str) -> tuple[str | None, str | None]:
    username, _, password = login.partition(":")
    return unquote(username) or None, unquote(password) or None


def _split_host(place: str, default_port: int) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `[ipv6]` or `[ipv6]:port`."""
    if place.startswith("["):
        host, _, rest = place[1:].partition("]")
        port_text = rest.removeprefix(":")
    else:
        host, _, port_text = place.partition(":")
    if not host:
        raise ValueError(f"has no host; expected {FORMS}")
    if not port_text:
        return host, default_port
    if not port_text.isascii() or not port_text.isdigit() or not 0 < int(port_text) < 65536:
        raise ValueError(f"{port_text!r} is not a port number")
    return host, int(port_text)


def _db(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is not a database number")
    return int(text)


def _login(username: str | None, password: str | None) -> str:
    if username is None and password is None:
        return ""
    secret = "" if password is None else ":" + (password if password == "***" else quote(password, safe=""))
    return f"{quote(username or '', safe='')}{secret}@"


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
