"""Who comes in: a rate for each client, and a token where one is needed, from the header or as a cookie."""

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from lapclip.serve.limits import Rates
from lapclip.serve.refusals import Answer, Refused

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SECONDS_IN_A_MONTH = 30 * 86400


class Door:
    """Stands before the application, behind the guard that knows which names and pages may ask at all."""

    def __init__(self, app: "ASGIApp", *, token: str | None, rates: Rates, port: int):
        self.app, self.rates = app, rates
        self.token = digest(token.encode()) if token is not None else None
        self.cookie = f"lapclip-{port}"  # cookies are shared by all ports of a machine

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        try:
            answer = self.check(scope) or self.app
        except Refused as refused:
            answer = refused.answer()
        await answer(scope, receive, send)

    def check(self, scope: "Scope") -> Answer | None:
        """Refused, or the answer that gives somebody who came with a token in the address a cookie instead."""
        self.rates.count(scope["client"][0] if scope.get("client") else "")
        if self.token is None:
            return None
        given = token_of(scope["query_string"]) if scope["path"] == "/" else b""
        if self.is_token(given):
            return self.let_in(given.decode("ascii"), is_encrypted=scope.get("scheme") == "https")
        headers = dict(scope["headers"])
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and self.is_token(given.strip()):
            return None
        if self.is_token(cookie_of(headers.get(b"cookie", b""), self.cookie)):
            return None
        raise Refused(
            401,
            "a token is needed",
            "open the address that `lapclip serve` printed",
            (b"www-authenticate", b"Bearer"),
        )

    def let_in(self, token: str, is_encrypted: bool) -> Answer:
        """A new address, so that the token is left behind in no history of what was asked."""
        cookie = f"{self.cookie}={token}; HttpOnly; SameSite=Strict; Path=/; Max-Age={SECONDS_IN_A_MONTH}"
        cookie += "; Secure" if is_encrypted else ""  # as a proxy with TLS says
        return Answer(b"", b"text/plain", 303, ((b"location", b"/"), (b"set-cookie", cookie.encode("ascii"))))

    def is_token(self, given: bytes) -> bool:
        """In the same time, whatever was given: digests are equally long."""
        return self.token is not None and hmac.compare_digest(digest(given), self.token)


def digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def cookie_of(header: bytes, name: str) -> bytes:
    try:
        cookies = SimpleCookie(header.decode("latin-1"))
    except CookieError:
        return b""
    return cookies[name].value.encode("latin-1", "replace") if name in cookies else b""


def token_of(query: bytes) -> bytes:
    try:
        fields = parse_qs(query.decode("latin-1"), max_num_fields=100)
    except ValueError:
        return b""
    return fields.get("token", [""])[0].encode("utf-8", "replace")
