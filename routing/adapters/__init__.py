"""Routes in other people's transformers: `attach`, `detach`, and adapters that describe a model to them."""

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.attached import attach, detach
from routing.adapters.proof import prove
from routing.adapters.propose import propose_adapter
