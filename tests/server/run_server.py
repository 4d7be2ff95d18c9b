"""``serve()`` with the configs given as JSON, as a script for `tiny_server`."""

from __future__ import annotations

import json
import sys

from octavo.config import EngineConfig, ServerConfig
from octavo.engine.child import COMMAND
from octavo.server.run import serve

options = json.loads(sys.argv[1])
sys.exit(
    serve(
        EngineConfig(**options["engine"]),
        ServerConfig(**options["server"]),
        engine_command=options["command"] or COMMAND,
    )
)
