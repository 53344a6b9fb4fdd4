// The part of chat.html that takes images: pasted, dropped, from files, and from the camera. They go with the next message.

import { bitmapOf } from './images.mjs';
import { release } from './listen.mjs';

const SHOWN = 96;   // pixels of the longer edge of an image on the page

/**
 * Return two functions: `take` removes the images that were chosen so far and returns them as [{part, picture, ...}], with the part of a
 * message and a small picture; `giveBack` adds images that were taken.
 */
export function look({ name: model, vision }, { part }) {
  const [seeing, chosen, input, camera, viewer, video, shoot, status] = ['seeing', 'chosen', 'image', 'camera', 'viewer', 'video', 'shoot', 'status'].map(part), low = part('low');
  const images = [];
  let adding = Promise.resolve(), stream = null;

  /** Add images [file, name]; a file may be a promise. */
  function add(files) {
    for (const [file, name] of files) adding = adding.then(() => added(file, name));
  }

  /** Add an image. The page keeps its bytes, because a file on the disk may change before the next turn reads it again. */
  async function added(given, name) {
    try {
      if (vision === null) throw new Error(`${model} reads no images in the browser; export a model of the family SmolVLM`);
      const found = await given;
      if (found === null) throw new Error('the camera gave no picture');
      const file = new Blob([await found.arrayBuffer()], { type: found.type });
      show({ name, file, picture: await pictureOf(file) });
    } catch (error) {
      status.textContent = `${name} cannot be used: ${error.message}`;
    }
  }

  /** Add an image to those that were chosen, and show it as a button that removes it. */
  function show(image) {
    const remove = document.createElement('button');
    remove.type = 'button';
    remove.title = `Remove ${image.name}`;
    remove.append(image.picture);
    remove.addEventListener('click', () => {
      images.splice(images.indexOf(image), 1);
      remove.remove();
    });
    images.push(image);
    chosen.append(remove);
  }

  /** Open the camera, and show what it sees. If it cannot be used, say why. */
  async function open() {
    camera.disabled = true;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: true });
      video.srcObject = stream;
      await video.play();
      viewer.hidden = false;
      camera.textContent = 'Close camera';
    } catch (error) {
      close();
      status.textContent = `The camera cannot be used: ${error.message}`;
    } finally {
      camera.disabled = false;
    }
  }

  function close() {
    if (stream !== null) release(stream);
    stream = video.srcObject = null;
    viewer.hidden = true;
    camera.textContent = 'Camera';
  }

  /** Add what the camera sees now as an image, and close the camera. */
  function shot() {
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    canvas.getContext('2d').drawImage(video, 0, 0);
    close();
    add([[new Promise((made) => canvas.toBlob(made, 'image/png')), 'Picture']]);
  }

  const given = (files) => add([...files].map((file) => [file, file.name]));
  camera.addEventListener('click', () => (stream === null ? open() : close()));
  shoot.addEventListener('click', shot);
  input.addEventListener('change', () => {
    given(input.files);
    input.value = '';
  });
  document.addEventListener('paste', (event) => {
    const { files, types } = event.clipboardData;
    if (files.length === 0 || types.includes('text/plain')) return;   // some programs copy text with a picture of it
    event.preventDefault();
    given(files);
  });
  document.addEventListener('dragover', (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  document.addEventListener('drop', (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    given(event.dataTransfer.files);
  });
  seeing.hidden = vision === null;

  async function take() {
    await adding;
    chosen.replaceChildren();
    const detail = low.checked ? 'low' : 'auto';
    return images.splice(0).map((image) => ({ ...image, part: { type: 'image_url', image_url: { url: image.file, detail } } }));
  }

  return { take, giveBack: (taken) => taken.forEach(show) };
}

const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes('Files');

/** Return a small picture of an image. Throw for a file that cannot be read. */
async function pictureOf(file) {
  const bitmap = await bitmapOf(file), picture = document.createElement('canvas'), scale = Math.min(SHOWN / Math.max(bitmap.width, bitmap.height), 1);
  [picture.width, picture.height] = [bitmap.width, bitmap.height].map((length) => Math.max(Math.round(length * scale), 1));
  picture.getContext('2d').drawImage(bitmap, 0, 0, picture.width, picture.height);
  bitmap.close();
  return picture;
}
