"""What is asked of the engine, how it is timed, what the hardware allows, and how the result is told."""
