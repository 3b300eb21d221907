"""Which file speaks which API."""

from collections.abc import Mapping

from noria.services.proxy.exchange import Kind
from noria.services.proxy.wire import chat, completions, embeddings, messages, responses
from noria.services.proxy.wire.api import Api

APIS: Mapping[Kind, Api] = {
    Kind.CHAT: chat.API,
    Kind.COMPLETION: completions.API,
    Kind.RESPONSE: responses.API,
    Kind.EMBEDDING: embeddings.API,
    Kind.MESSAGE: messages.API,
}
