"""LoRA over the engine: adapters, the inference copy that is refreshed in place, and the proof that nothing drifted."""
import logging

# importing PEFT imports bitsandbytes, which warns that an optional faster 4-bit kernel for CPUs is not installed
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
