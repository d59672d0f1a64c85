-- Shared: who gets an earmark (h_earmarks.lua), and whose goes: what `tick` looks at, a bounded piece of the queue at a time.

local FIELD, MOST, AT_ONCE, NODE_JOBS = 'earmark', 64, 8, 256

-- when all that runs on a machine ends at the latest, by its timeouts; 0 where one has none
local function known_end(P, node)
  local held, last = redis.call('HKEYS', P .. 'held:' .. node), 0
  if #held > NODE_JOBS then return 0 end
  for _, ref in ipairs(held) do
    local v = redis.pcall('HMGET', H.job(P, string.match(ref, '^(.*)/') or ref), 'started_ms', 'timeout_ms', 'ride', 'parent')
    local started, timeout = not v.err and tonumber(v[1] or nil), not v.err and tonumber(v[2] or nil)
    if not started or not timeout or v[3] or v[4] then return 0 end
    last = math.max(last, started + timeout)
  end
  return last
end

local function make(P, w, c, now)
  local until_ms = known_end(P, w.node)
  redis.call('HSET', P .. 'earmarks', w.node, c.id .. ' 0')
  redis.call('HSET', H.job(P, c.id), FIELD, w.node)
  H.write_earmark(P, w.node, {job = c.id, sig = c.sig, owner = c.owner, prio = c.prio, worker = w.name, until_ms = until_ms,
                              devices = ''})
  H.doubt_rooms(P, w.node)
  if redis.call('HEXISTS', P .. 'room', w.name) == 1 then H.wake(P, w.class, w.name, '', now) end
end

-- a worker that may have something kept for a job; nil where it takes nothing
local function facts(P, name, now)
  local v = redis.call('HMGET', P .. 'worker:' .. name, 'class', 'node', 'state', 'slots', 'cpus', 'memory', 'quarantined_until',
                       'no_earmark_until')
  if not v[1] or v[3] ~= 'online' or tonumber(v[7] or '0') > now or tonumber(v[8] or '0') > now then return nil end
  if not H.fresh(P, name, now) then return nil end
  return {name = name, class = v[1], node = v[2], slots = tonumber(v[4]), cpus = tonumber(v[5]), memory = tonumber(v[6])}
end

local function could_hold(w, need) return need.cpus <= math.min(w.slots, w.cpus) and need.memory <= w.memory end

-- what a worker has free, and what each attempt on its machine holds
local function ledger(P, w)
  local mine, cpus, memory, lots = w.slots, w.cpus, w.memory, {}
  for _, text in ipairs(redis.call('HVALS', P .. 'held:' .. w.node)) do
    local who, c, m = string.match(text, '^(%S+) (%d+) (%d+)$')
    if who then
      cpus, memory = cpus - c, memory - m
      if who == w.name then mine = mine - c end
      lots[#lots + 1] = {is_mine = who == w.name, cpus = tonumber(c), memory = tonumber(m)}
    end
  end
  return {mine = mine, cpus = cpus, memory = memory, lots = lots}
end

local function has_room(l, need) return need.cpus <= math.min(l.mine, l.cpus) and need.memory <= l.memory end

-- more jobs than one share a device of this worker
local function shares_devices(P, w)
  local info = redis.call('HGET', P .. 'worker:' .. w.name, 'info')
  return tonumber(string.match(info or '', '"gpu_share": *(%d+)') or '1') > 1
end

-- whether something smaller than the job runs here, of what the job lacks: the measure of what could starve, for another of that
-- size fits into the gap which it leaves. Who lacks nothing, or waits for what no end here brings, is left alone
local function is_large(P, w, need, groups, l)
  if #l.lots == 0 then return false end
  if need.letter == 'g' and (need.gpus > 1 or (need.vram > 0 and shares_devices(P, w))) then
    local room = has_room(l, need) and H.room_of(P, w.name)
    return not (room and not room.unknown and H.fit(room, need, groups))
  end
  for _, one in ipairs(l.lots) do
    if l.mine < need.cpus and one.is_mine and one.cpus < need.cpus then return true end
    if l.cpus < need.cpus and one.cpus < need.cpus then return true end
    if l.memory < need.memory and one.memory < need.memory then return true end
  end
  return false
end

local function shortage(l, need)
  local cpus = need.cpus > 0 and (need.cpus - math.min(l.mine, l.cpus)) / need.cpus or 0
  return math.max(cpus, need.memory > 0 and (need.memory - l.memory) / need.memory or 0)
end

-- what waits, in the order in which an empty worker would take it: the oldest of 64 owners a priority, 128 in all
local function line(P)
  local out = {}
  for i, prio in ipairs(H.PRIORITIES) do
    local who, counts = H.owners_by_share(P, prio)
    local some, most = {}, math.max(2, math.floor(128 / math.max(1, #who)))
    for _, owner in ipairs(who) do
      local h = redis.call('ZRANGE', P .. 'heads:' .. prio .. ':' .. owner, 0, most - 1, 'WITHSCORES')
      for k = 1, #h, 2 do
        some[#some + 1] = {prio = i - 1, owner = owner, held = counts[owner] or 0, sig = h[k], need = H.amounts(h[k]),
                           seq = tonumber(h[k + 1])}
      end
    end
    table.sort(some, function(a, b)
      if a.held ~= b.held then return a.held < b.held end
      return a.seq < b.seq
    end)
    for _, c in ipairs(some) do
      if #out < 128 and c.need then out[#out + 1] = c end
    end
  end
  return out
end

-- the record of what waits, read once: its id, since when it waits, its earmark; one that is broken has waited for nothing
local function read(P, c, now)
  if c.known then return c end
  local entry = string.format('%d-0', c.seq)
  local e = redis.call('XRANGE', H.stream(P, c.sig, c.owner, c.prio), entry, entry)
  local v = e[1] and redis.pcall('HMGET', H.job(P, e[1][2][2]), 'queued_ms', FIELD, 'cancel')
  c.known, c.waited_ms = true, 0
  if v and not v.err and not v[3] then
    c.id, c.waited_ms, c.earmark = e[1][2][2], now - (tonumber(v[1] or nil) or now), v[2]
  end
  return c
end

-- the job that a worker would keep its machine for: the first in line that it could run, if that has waited for so long and is
-- large. A job that lacks nothing here waits for something else, a disk, and keeps nobody from their turn
local function first_for(P, w, waiting, patience_ms, now)
  for _, c in ipairs(waiting) do
    if w.fits[c.sig] and could_hold(w, c.need) and not read(P, c, now).earmark then
      if c.waited_ms < patience_ms then return nil end
      w.ledger = w.ledger or ledger(P, w)
      if is_large(P, w, c.need, w.fits[c.sig], w.ledger) then return c end
      if c.need.gpus > 0 or not has_room(w.ledger, c.need) then return nil end
    end
  end
end

local function fits_of(P, class, waiting)
  local names, fits = {}, {}
  for i, c in ipairs(waiting) do names[i] = c.sig end
  for i, groups in ipairs(redis.call('HMGET', P .. 'fits:' .. class, unpack(names))) do fits[names[i]] = groups or nil end
  return fits
end

-- 256 workers, those that were heard last
local function askable(P, waiting, now)
  local out, fits = {}, {}
  for _, name in ipairs(redis.call('ZREVRANGE', P .. 'workers', 0, 255)) do
    local w = facts(P, name, now)
    if w then
      fits[w.class] = fits[w.class] or fits_of(P, w.class, waiting)
      w.fits, out[#out + 1] = fits[w.class], w
    end
  end
  return out
end

-- the worker, of those with a job that they would keep their machine for, that is nearest to having room; and that job
local function best_place(P, workers, waiting, kept, patience_ms, now)
  local best, its, least
  for _, w in ipairs(workers) do
    local c = first_for(P, w, waiting, patience_ms, now)
    local other = kept[w.node]
    if c and (not other or c.prio < other.prio) then
      local lacks = shortage(w.ledger, c.need)
      if not best or lacks < least or (lacks == least and #w.ledger.lots < #best.ledger.lots) then best, its, least = w, c, lacks end
    end
  end
  return best, its
end

-- a worker that has room for the job, as far as the ledger tells, is told so, and loses the earmark where that changes nothing
local function is_served(P, w, e, since_ms, patience_ms, now)
  local need, l = H.amounts(e.sig), ledger(P, w)
  if not has_room(l, need) or (need.letter == 'g' and #l.lots > 0) then
    if since_ms > 0 then redis.call('HSET', P .. 'earmarks', w.node, e.job .. ' 0') end
    return true
  end
  if since_ms == 0 then
    redis.call('HSET', P .. 'earmarks', w.node, string.format('%s %d', e.job, now))
    H.poke(P, w.name, now)
  end
  if since_ms == 0 or now - since_ms < patience_ms then return true end
  redis.call('HSET', P .. 'worker:' .. w.name, 'no_earmark_until', now + patience_ms)
  return false
end

-- whether an earmark still has a job that waits and a worker that could take it
local function stands(P, node, e, since_ms, patience_ms, now)
  local marked, state = unpack(redis.call('HMGET', H.job(P, e.job), FIELD, 'state'))
  local w = marked == node and not H.FINAL[state] and facts(P, e.worker, now)
  if not w or w.node ~= node or redis.call('HEXISTS', P .. 'fits:' .. w.class, e.sig) == 0 then return false end
  return could_hold(w, H.amounts(e.sig)) and is_served(P, w, e, since_ms, patience_ms, now)
end

local function review(P, patience_ms, now)
  local kept, n, all = {}, 0, redis.call('HGETALL', P .. 'earmarks')
  for i = 1, #all, 2 do
    local node, e, job, since = all[i], H.earmark_of(P, all[i]), string.match(all[i + 1], '^(%S+) (%d+)$')
    if e and e.job == job and patience_ms > 0 and stands(P, node, e, tonumber(since), patience_ms, now) then
      kept[node], n = e, n + 1
    else
      H.lift(P, node, e and e.job or job, now)
      redis.call('HDEL', P .. 'earmarks', node)
    end
  end
  return kept, n
end

local function somebody_waits(P)
  local keys = {}
  for i, prio in ipairs(H.PRIORITIES) do keys[i] = P .. 'waiting:' .. prio end
  return redis.call('EXISTS', unpack(keys)) > 0
end

-- looks, at most ten times in the time that a job waits for an earmark, whether one goes or is to be made; ms until the next look
function H.look_at_earmarks(P, now)
  local patience_ms = H.config(P, 'earmark_ms', 60000)
  local kept, n = review(P, patience_ms, now)
  if patience_ms <= 0 or not somebody_waits(P) then return nil end
  local pause, last = math.max(1, patience_ms / 10), tonumber(redis.call('HGET', P .. 'clock', 'earmarks_ms') or '0')
  if now >= last and now < last + pause then return math.ceil(last + pause - now) end
  redis.call('HSET', P .. 'clock', 'earmarks_ms', now)
  local waiting = n < MOST and line(P) or {}
  local workers = #waiting > 0 and askable(P, waiting, now) or {}
  for _ = 1, math.min(AT_ONCE, MOST - n) do
    local w, c = best_place(P, workers, waiting, kept, patience_ms, now)
    if not w then break end
    if kept[w.node] then H.lift(P, w.node, kept[w.node].job, now) end
    make(P, w, c, now)
    c.earmark, c.job, kept[w.node] = w.node, c.id, c
  end
  return math.ceil(pause)
end
