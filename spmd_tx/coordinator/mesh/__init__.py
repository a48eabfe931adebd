"""The workers as the coordinator sees them: the ZeroMQ hub, generations, the watchdog, causes of losses."""
