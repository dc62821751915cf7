"""Print which weights, ways to keep them and adapters can be run together, on which device, captured or not.

    python scripts/capabilities.py
"""
from gemma4_flex.capabilities import table

if __name__ == "__main__":
    print(table())
