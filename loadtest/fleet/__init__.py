"""A fleet in a box: the engine model behind vLLM's HTTP surface and real KV events over ZMQ, in real time.

Rooms: text (tokens), events (ZMQ), pod (the loop), faults, http, metrics, launch. No part of it knows the router's
keys: router.core.hashing and router.index are forbidden here (import-linter checks it).
"""

from loadtest.fleet.launch import RunningPod, running_fleet
from loadtest.fleet.pod import EmulatedPod, PodConfig
from loadtest.fleet.text import TINY_MODEL, ModelText

__all__ = ["TINY_MODEL", "EmulatedPod", "ModelText", "PodConfig", "RunningPod", "running_fleet"]
