"""Embeddings of images: the forms in which requests have them, what counts as tokens, and what is refused."""

from __future__ import annotations

import base64

import pytest

from runtime.fits import Naflex, Stretched
from server.messages import Vision
from tests.server.images.files import data_url, encoded, image

FILE = encoded(image())
OTHER = encoded(image(seed=2))
VISION = Vision(8, edge_tokens=1, image_token=-1, fit=Stretched(), filter=2, num_places=17)
PATH = "/v1/embeddings"


@pytest.fixture
def looker(serve, answering):
    return serve(script=answering("", embedding_size=8, generates=False, vision=VISION))


def vectors(server, **body):
    answer = server.http().post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    assert [row["index"] for row in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return [row["embedding"] for row in answer.json()["data"]]


def test_texts_and_images_in_their_order(looker):
    one, two = {"image": data_url(FILE)}, {"image": data_url(OTHER)}
    (image_alone,), (text_alone,) = vectors(looker, input=[one]), vectors(looker, input="cat")
    (other_alone,) = vectors(looker, input=[two])
    assert image_alone != other_alone != text_alone
    mixed = vectors(looker, input=[two, {"text": "cat"}, one, "cat"])
    assert mixed == [other_alone, text_alone, image_alone, text_alone]


def test_an_image_is_a_url_or_base64(looker):
    bare = base64.b64encode(FILE).decode()
    assert vectors(looker, input=[{"image": bare}]) == vectors(looker, input=[{"image": data_url(FILE)}])


def test_a_conversation_with_an_image_has_its_vector(looker):
    """Clients of vLLM send the images that they want embedded in the messages of a conversation."""
    part = {"type": "image_url", "image_url": {"url": data_url(FILE)}}
    expected = vectors(looker, input=[{"image": data_url(FILE)}])
    assert vectors(looker, messages=[{"role": "user", "content": [part]}]) == expected
    assert vectors(looker, messages=[{"role": "user", "content": [part, {"type": "text", "text": ""}]}]) == expected
    text = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]}]
    plain = [{"role": "user", "content": "a cat"}]
    assert vectors(looker, messages=text) == vectors(looker, input="a cat") == vectors(looker, messages=plain)


def test_the_official_client_sends_images(looker):
    answer = looker.openai().embeddings.create(model="null", input=[{"image": data_url(FILE)}, {"text": "cat"}])
    assert len(answer.data) == 2
    assert answer.usage.prompt_tokens == 17 + len("cat") + 1


def test_fewer_dimensions_of_an_image_have_length_one_again(looker):
    (short,) = vectors(looker, input=[{"image": data_url(FILE)}], dimensions=3)
    assert len(short) == 3 and sum(value * value for value in short) == pytest.approx(1, abs=1e-5)


def test_an_image_of_any_size_counts_as_its_patches(serve, answering):
    vision = Vision(8, edge_tokens=1, image_token=-1, fit=Naflex(12), filter=2, num_places=1)
    server = serve(script=answering("", embedding_size=8, generates=False, vision=vision))
    answer = server.http().post(PATH, json={"input": [{"image": data_url(encoded(image(80, 40)))}]}).json()
    (embed,) = server.worker.embeds
    assert answer["usage"]["prompt_tokens"] == embed.crop.num_tokens == 8  # 4 by 2; with 3 rows there would be too many


def test_the_worker_gets_the_crop(looker):
    vectors(looker, input=[{"image": data_url(FILE)}, "cat"])
    crops = [embed.crop for embed in looker.worker.embeds]
    assert [crop is None for crop in crops] == [False, True] or [crop is None for crop in crops] == [True, False]
    assert {len(crop.pixels) for crop in crops if crop is not None} == {8 * 8 * 3}


def test_texts_are_padded_if_the_model_was_trained_so(serve, answering):
    server = serve(script=answering("", embedding_size=8, generates=False, padded_to=12))
    answer = server.http().post(PATH, json={"input": ["cat", "a longer one"[:11]]}).json()
    assert answer["usage"]["prompt_tokens"] == 24
    assert all(len(embed.prompt_ids) == 12 for embed in server.worker.embeds)
    assert {embed.prompt_ids[-1] for embed in server.worker.embeds} == {257, ord("n")}


@pytest.mark.parametrize(("side", "expected"), [("left", [256, 101, 102]), (None, [256, 97, 98]), ("right", [256, 97, 98])])
@pytest.mark.parametrize("given", ["abcdef", [256, *b"abcdef"]], ids=["text", "tokens"])
@pytest.mark.parametrize("generates", [True, False])
def test_special_tokens_are_kept_of_a_text_that_is_cut(serve, answering, generates, side, expected, given):
    """The vector of a text is often that of its first or last token, which is a special one."""
    server = serve(script=answering("", embedding_size=8, generates=generates))
    body = {"input": given, "truncate_prompt_tokens": 3, "truncation_side": side}
    assert server.http().post(PATH, json=body).status_code == 200
    assert [list(embed.prompt_ids) for embed in server.worker.embeds] == [expected]


def test_an_image_alone_needs_no_special_tokens(looker):
    expected = vectors(looker, input=[{"image": data_url(FILE)}])
    assert vectors(looker, input=[{"image": data_url(FILE)}], add_special_tokens=False) == expected


def test_an_error_names_the_field_of_the_part(looker):
    for given, param in (
        ([{"image": 5}], "input[0].image"),
        (["x", {"text": [1]}], "input[1].text"),
        ([{"image": "x"}, 5], "input[1]"),
        ([{"image": "x"}] * 2049, "input"),
        ([5, {"text": "x"}], "input[0]"),
    ):
        answer = looker.http().post(PATH, json={"input": given})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error


IMAGE = {"image": data_url(FILE)}
PART = {"type": "image_url", "image_url": {"url": data_url(FILE)}}


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"input": [{"image": "file:///etc/passwd"}]}, "input[0].image", "expected a data: URL"),
        ({"input": ["x", {"image": data_url(b"noise")}]}, "input[1].image", "expected a file of PNG"),
        ({"input": [{"image": "!"}]}, "input[0].image", "not base64"),
        ({"input": [{}]}, "input[0]", "neither text and image"),
        ({"input": [{"text": "a", "image": "b"}]}, "input[0]", "both text and image"),
        ({"input": [IMAGE] * 99}, "input", "99 images; expected at most"),
        ({"messages": [{"role": "user", "content": [PART, PART]}]}, "messages", "2 images and 0 texts"),
        ({"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "x"}]}]}, "messages", "1 images and 1 texts"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type", "'input_audio'"),
        ({"input": [IMAGE], "messages": [{"role": "user", "content": "x"}]}, "messages", "input and messages are given"),
        ({"input": [{"text": "x"}], "messages": [{"role": "user", "content": [PART]}]}, "messages", "input and messages are given"),
        ({"input": [IMAGE], "prompt_name": "query"}, "prompt_name", "expected none"),
        ({"input": [IMAGE], "dimensions": 9}, "dimensions", "at most the model's 8"),
    ],
)
def test_refusals_name_the_field(looker, body, param, text):
    answer = looker.http().post(PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert text in error["message"]


def test_a_model_of_texts_refuses_images(serve, answering):
    server = serve(script=answering("", embedding_size=8, generates=False))
    error = server.http().post(PATH, json={"input": ["x", IMAGE]}).json()["error"]
    assert error["param"] == "input[1].image" and "embeds only texts" in error["message"]
    assert server.http().post(PATH, json={"input": [{"text": "x"}]}).status_code == 200


@pytest.mark.parametrize("path", ["/pooling"])
def test_other_endpoints_take_no_objects(looker, path):
    error = looker.http().post(path, json={"input": [IMAGE]}).json()["error"]
    assert error["param"] == "input" and "input has objects" in error["message"]
