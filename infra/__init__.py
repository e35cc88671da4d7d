"""Settings, registry, query log, artifact store, processes: moves bytes, and knows no tensor and no method."""
