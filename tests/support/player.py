"""An agent for the tests of runs."""

import openai

CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="none")


def play(base_url, prompt):
    chat = CLIENT.with_options(base_url=base_url).chat.completions
    messages = [{"role": "user", "content": prompt}]
    for _ in range(2):
        message = chat.create(model="m", messages=messages).choices[0].message
        messages += [message, {"role": "user", "content": "more:"}]
    return len(message.content) / 10
