"""`octavo bench serve`: load on any OpenAI-compatible server, and what its clients saw of it.

``client`` sends and times, ``metrics`` sums up, ``sweep`` goes through rates, ``report`` and
``plot`` show. Metrics have the names and meanings of ``vllm bench serve``.
"""
