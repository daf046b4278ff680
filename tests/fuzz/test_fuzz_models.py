"""Models of strangers, by their JSON: `BadMessage` and nothing else, whatever it says."""

import contextlib
import json

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from roles.models.config import read_config_untrusted, write_config
from roles.models.errors import BadModel
from roles.models.safetensors import decode_untrusted
from roles.models.template import ChatTemplate
from tests.support.models import QWEN2, QWEN3, SMOLLM2

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([0, 1, 2, 64, 10**400, "default", "llama", "full_attention"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["rope_type", "rope_theta", "type", "a"]), inner, max_size=3
    ),
    max_leaves=6,
)  # fmt: skip
KEYS = sorted({*SMOLLM2, *QWEN2, *QWEN3, "quantization_config", "num_experts", "auto_map"})


@given(
    st.sampled_from([SMOLLM2, QWEN2, QWEN3]),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
)
def test_any_config(table: dict[str, object], changes: dict[str, object]) -> None:
    with contextlib.suppress(BadMessage):
        config = read_config_untrusted(json.dumps({**table, **changes}).encode())
        if not config.shape.architecture:  # others keep their own file
            assert read_config_untrusted(write_config(config)) == config
        assert config.shape.parameters > 0


headers = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats()
    | st.sampled_from(["F32", "U8", "", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4
    ),
    max_leaves=20,
)  # fmt: skip


@given(headers, st.binary(max_size=32))
def test_any_header_of_weights(header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    with contextlib.suppress(BadMessage):
        decode_untrusted(len(text).to_bytes(8, "little") + text + data)


words = st.sampled_from([
    "{{", "}}", "{%", "%}", "messages", "for", "in", "if", "endif", "endfor", "set", "x", "=",
    "~", "+", "*", "**", "(", ")", "[", "]", "|", "join", "replace", "tojson", "range", ".",
    "role", "__class__", "'a'", "9", "100000", "loop", "macro", "endmacro", "generation",
    "recursive", "namespace", "{% for x in messages %}", "{% endfor %}", "{{ x.role }}",
])  # fmt: skip


@given(st.lists(words, max_size=20))
def test_any_template(parts: list[str]) -> None:
    with contextlib.suppress(BadModel):
        ChatTemplate(" ".join(parts), {}).render([{"role": "user", "content": "x"}])
