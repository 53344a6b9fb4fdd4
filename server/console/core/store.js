/* The store of conversations, in IndexedDB. If the browser forbids it, they last only as long as the page, and `isLasting` is false. The tabs
   of a browser share the store, and tell each other what they change. */

const NAME = "relaxserve", STORE = "conversations", VERSION = 1;

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export class Store {
  #database = null;
  #tabs = new BroadcastChannel(NAME);

  /* `changed` is called with the id of a conversation that another tab has stored or removed. */
  constructor(changed) {
    this.#tabs.addEventListener("message", ({data}) => changed(data));
  }

  get isLasting() {
    return this.#database !== null;
  }

  async open() {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: "id"});
      this.#database = await done(request);
    } catch {
      this.#database = null;
    }
  }

  async all() {
    return this.#database ? done(this.#database.transaction(STORE, "readonly").objectStore(STORE).getAll()) : [];
  }

  /* Return a conversation, or undefined if it is not there. */
  async get(id) {
    return this.#database ? done(this.#database.transaction(STORE, "readonly").objectStore(STORE).get(id)) : undefined;
  }

  async put(conversation) {
    if (this.#database) await this.#change(conversation.id, objects => objects.put(structuredClone(conversation)));
  }

  async remove(id) {
    if (this.#database) await this.#change(id, objects => objects.delete(id));
  }

  /* Return when a change of a conversation is stored. A browser may accept a request, and then have no room for its transaction. */
  #change(id, act) {
    const transaction = this.#database.transaction(STORE, "readwrite");
    return new Promise((resolve, reject) => {
      transaction.oncomplete = () => { this.#tabs.postMessage(id); resolve(); };
      transaction.onabort = () => reject(transaction.error ?? new Error("the browser does not store it"));
      act(transaction.objectStore(STORE));
      transaction.commit();  // else the browser waits for this page to handle the answer, and undoes the change if the page has gone
    });
  }
}
