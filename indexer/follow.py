"""The fleet's pods as event sources: every rank of every pod whose events and base model are known.

May import: router.fleet, router.core, indexer.
"""

from collections.abc import Sequence

from indexer.app import Indexer
from indexer.source import SourceSpec, rank_specs
from router.fleet.fleet import Fleet
from router.fleet.state import FleetState


def source_specs(state: FleetState) -> list[SourceSpec]:
    """Which event sources to subscribe to: every rank of every pod whose events and base model are known."""
    return [
        spec
        for pod in state.pods.values()
        if pod.events is not None and (model := pod.base_model(None)) is not None
        for spec in rank_specs(pod.spec.identity, model, pod.events, pod.replay, pod.ranks)
    ]


def follow(fleet: Fleet, indexer: Indexer) -> None:
    """Keep the indexer's subscriptions in step with the fleet."""
    known: list[Sequence[SourceSpec]] = [()]

    def changed(state: FleetState) -> None:
        specs = source_specs(state)
        if specs != known[0]:
            known[0] = specs
            indexer.set_pods(specs)

    fleet.on_change(changed)
    fleet.on_restart(indexer.restarted)
