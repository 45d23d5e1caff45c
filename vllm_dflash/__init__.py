# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding for vLLM, as a plugin.

Importing this package loads neither torch nor vLLM: every process that vLLM starts imports it.
"""

__version__ = "0.1.0"
