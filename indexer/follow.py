"""The fleet's pods as event sources: every rank of every pod whose events and base model are known.

May import: router.fleet, router.core, indexer.
"""

from collections.abc import Sequence

from indexer.app import Indexer
from indexer.source import SourceSpec, at_rank, rank_specs
from router.core.types import WorkerAddress
from router.fleet.fleet import Fleet
from router.fleet.state import FleetState, Pod


def source_specs(state: FleetState) -> list[SourceSpec]:
    """Which event sources to subscribe to: every rank of every pod whose events and base model are known."""
    return [
        spec
        for pod in state.pods.values()
        if (model := pod.base_model(None)) is not None
        for spec in _of_pod(pod, model)
    ]


def _of_pod(pod: Pod, model: str) -> list[SourceSpec]:
    """As configured: base port + rank. Else as the pod tells for each of its ranks."""
    configured = pod.spec
    if configured.events is not None:
        return rank_specs(configured.identity, model, configured.events, configured.replay, pod.ranks)
    return [
        SourceSpec(
            WorkerAddress(configured.identity, rank),
            model,
            events,
            at_rank(configured.replay, rank) if configured.replay else replay,
        )
        for rank, (events, replay) in enumerate(pod.source.endpoints if pod.source else ())
        if events is not None
    ]


def follow(fleet: Fleet, indexer: Indexer) -> None:
    """Keep the indexer's subscriptions in step with the fleet."""
    known: list[Sequence[SourceSpec]] = [()]

    def changed(state: FleetState) -> None:
        specs = source_specs(state)
        if specs != known[0]:
            known[0] = specs
            indexer.set_pods(specs)

    indexer.activity = fleet.activity
    fleet.on_change(changed)
    fleet.on_restart(indexer.restarted)
