# SPDX-License-Identifier: Apache-2.0
"""Ask a running server: nothing in the client knows about speculation.

vllm-dflash serve &                                          # the demo pair on port 8000
python examples/openai_client.py http://127.0.0.1:8000/v1
"""

import sys

import httpx
from openai import OpenAI

COUNTERS = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """Stream one answer, then show the server's counters."""
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Name the four seasons."}]
    for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    for line in httpx.get(base_url.removesuffix("/v1") + "/metrics").text.splitlines():
        if line.startswith(COUNTERS):
            print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
