"""Chat templates of published models."""

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "headers": """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|system|>" + system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<' + message['role'] + '>\n\n' + message['content'] | trim + '</>' }}
    {%- endif %}
{%- endfor %}
""",
    "thinking": """{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and
           not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.reasoning_content is string %}
        {%- set thought = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n') %}
        {%- set thought = thought.split('<think>')[-1].lstrip() %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last or (loop.last and thought) %}
        {{- '<t>' + thought.strip('\n') }}
    {%- endif %}
    {{- '<' ~ message.role ~ '>' ~ content.replace('/no_think', '') ~ loop.index }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<none>' }}{%- endif %}
""",
    "lists": """{{- bos_token }}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(kept=[]) %}
{%- for message in messages if message["role"] not in ["tool"] and not message.get("calls") %}
    {%- set ns.kept = ns.kept + [message] %}
{%- endfor %}
{%- for message in ns.kept %}
    {%- if message == users[-1] %}{{ '[last]' }}{%- endif %}
    {%- for key, value in message.items() if key != "return" %}
        {{- '"' + key + '": ' + value|tojson }}{{ ", " if not loop.last else "" }}
    {%- endfor %}
    {%- if (loop.index0 % 2 == 0) != (message.role == 'user') %}{{ '|' }}{%- endif %}
    {% generation %}{{ message.content|upper|first|default('x') }}{% endgeneration %}
{%- endfor %}
{{ tools is none }}{{ documents is none }}{{ messages|map(attribute='role')|unique|join(',') }}
""",
}
"""In the manner of templates in use: ChatML, Llama 3's, Qwen 3's, Mistral's.
tests/interop/test_transformers.py renders them with transformers."""
