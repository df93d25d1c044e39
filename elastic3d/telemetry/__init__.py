"""What a node's first keeper tells a collector of OpenTelemetry, by OTLP: its metrics, and spans of what happened.

`span` says what a span is and who makes which id, `spans` makes them from a keeper's events, `conventions` names
metrics as OpenTelemetry does, `collector` sends both by the SDK's exporters, `exporting` does so on a thread. A job
that asks for no telemetry imports nothing of OpenTelemetry.
"""
