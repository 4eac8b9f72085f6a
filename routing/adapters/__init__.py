"""Routes in other people's transformers: `attach` and `detach`, and the adapters that they need."""

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.attached import attach, detach
from routing.adapters.proof import prove
from routing.adapters.propose import propose_adapter
