-- Shared: which job a worker takes. Within a priority the owner who holds least goes first, then age; a signature never
-- starves another. Used by claim, by commit (its next claim) and by nothing else.

-- the oldest job of one owner that fits: the 64 oldest heads, then the class's own signatures
local function oldest(P, heads, class, room, may)
  local function candidate(sig)
    local need = H.amounts(sig)
    if not need then return nil end
    if need.cpus > room.cpus or need.memory > room.memory or need.disk > room.disk then return nil end
    local groups = redis.call('HGET', P .. 'fits:' .. class, sig)
    local lots = groups and H.pick_lots(room.lots, need, groups)
    return lots and {sig = sig, need = need, lots = lots}
  end
  local h = redis.call('ZRANGE', heads, 0, 63, 'WITHSCORES')
  for i = 1, #h, 2 do
    local c = candidate(h[i])
    if c and (not may or may(h[i], tonumber(h[i + 1]))) then c.seq = tonumber(h[i + 1]); return c end
  end
  if #h < 128 then return nil end
  local sigs, best = redis.call('HKEYS', P .. 'fits:' .. class), nil
  for i = 1, #sigs, 1000 do
    local scores = redis.call('ZMSCORE', heads, unpack(sigs, i, math.min(i + 999, #sigs)))
    for k = 1, #scores do
      local seq = scores[k] and tonumber(scores[k])
      if seq and (not best or seq < best.seq) then
        local c = candidate(sigs[i + k - 1])
        if c and (not may or may(sigs[i + k - 1], seq)) then c.seq = seq; best = c end
      end
    end
  end
  return best
end

-- owners with waiting work, the one who holds least first
function H.owners_by_share(P, prio)
  local who = redis.call('SRANDMEMBER', P .. 'waiting:' .. prio, 64)
  if #who < 2 then return who, {} end
  local held, counts = redis.call('HMGET', P .. 'owners', unpack(who)), {}
  for i, owner in ipairs(who) do counts[owner] = tonumber(held[i] or '0') end
  table.sort(who, function(a, b) return counts[a] < counts[b] end)
  return who, counts
end

-- of these places among the priorities (all, where none is named), and only what `may` allows of signature, owner, priority and age
function H.pick(P, class, room, first, last, may)
  for i = first or 1, last or #H.PRIORITIES do
    local prio = H.PRIORITIES[i]
    local who, counts = H.owners_by_share(P, prio)
    local best
    for _, owner in ipairs(who) do
      if best and counts[owner] > counts[best.owner] then break end
      local may_its = may and function(sig, seq) return may(sig, owner, prio, seq) end
      local c = oldest(P, P .. 'heads:' .. prio .. ':' .. owner, class, room, may_its)
      if c and (not best or c.seq < best.seq) then
        c.owner, c.prio, best = owner, prio, c
      end
    end
    if best then return best end
  end
end

-- what claim needs to know of a worker; nil and the answer where the queue does not know it, or knows its next incarnation
function H.worker(P, o)
  local v = redis.call('HMGET', P .. 'worker:' .. o.worker, 'incarnation', 'class', 'node', 'state', 'slots', 'cpus', 'memory', 'nonce',
                       'grants', 'grace_ms', 'quarantined_until')
  if v[1] ~= o.incarnation then return nil, {v[1] and 'superseded' or 'unknown'} end
  return {class = v[2], node = v[3], state = v[4], slots = tonumber(v[5]), cpus = tonumber(v[6]), memory = tonumber(v[7]),
          nonce = v[8], grants = v[9], grace = tonumber(v[10]), quarantined = tonumber(v[11] or '0')}
end

local function described(P, id, token)
  local v = redis.call('HMGET', H.job(P, id), 'token', 'lots', 'attempt', 'losses', 'options', 'spec', 'sig', 'owner', 'queued_ms',
                       'state', 'cancel', 'parent', 'from', 'to', 'ride', 'lane')
  if v[1] ~= token then return nil end
  if v[12] then
    v[5], v[6], v[9] = unpack(redis.call('HMGET', H.job(P, v[12]), 'options', 'spec', 'queued_ms'))
  end
  return {id, token, v[2] or '', v[3], H.digits(v[4]), v[5] or '', v[6] or '', v[7], v[8], H.digits(v[9]), v[10], v[11] or '',
          v[13] or '-1', v[14] or '-1', v[15] or '', v[16] or ''}
end

-- the grants of the same claim again: a lost reply grants nothing twice
local function repeated(P, w)
  local out = {}
  for id, token in string.gmatch(w.grants or '', '(%S+)/(%S+)') do
    out[#out + 1] = described(P, id, token)
  end
  return out
end

-- an entry without a record that can run leaves its stream; a record that is there ends as undecodable
local function set_aside(P, c, id, entry, v, now)
  H.drop_entry(P, c.sig, c.owner, c.prio, entry)
  if v.err or not (v[1] or v[3] or v[4]) then
    redis.call('ZREM', P .. 'jobs:queued', id)
  elseif v[1] == 'queued' or not v[1] then
    redis.call('HSET', H.job(P, id), 'state', 'queued', 'sig', c.sig, 'owner', c.owner, 'prio', c.prio, 'entry', '', 'token', '',
               'seq', tonumber(v[3]) or 0, 'attempt', tonumber(v[4]) or 0)
    H.finish(P, H.load(P, id), 'failed', 'undecodable', {'error', '{"type":"Undecodable","message":"its record is damaged"}'}, now)
  end
end

-- what a grant tells of the record; nothing of it but its entry is known to be there
function H.facts(P, id)
  return redis.pcall('HMGET', H.job(P, id), 'state', 'prepare', 'seq', 'attempt', 'count', 'queue', 'lane', 'losses', 'options', 'spec',
                     'queued_ms', 'cancel', 'earmark')
end

local function next_token(o, v, n)
  local attempt = string.format('%d', v[4] + 1)
  return attempt .. ':' .. o.nonce .. n, attempt
end

-- the attempt is this worker's from now on, `ride` what its record tells of its ride; returns the grant
local function assign(P, o, w, c, id, entry, v, token, attempt, lots, ride, now)
  local to = v[2] == '1' and 'scheduled' or 'running'
  redis.call('HSET', H.job(P, id), 'state', to, 'phase', '', 'attempt', attempt, 'token', token, 'worker', o.worker, 'node', w.node,
             'lots', lots, 'entry', entry, 'granted_ms', now, 'started_ms', to == 'running' and now or '', unpack(ride))
  H.place(P .. 'leases', id, now + o.lease + w.grace)
  H.belong(P .. 'running:' .. o.worker, id, true)
  H.index(P, id, 'queued', to, v[3])
  H.event(P, id, to)
  return {id, token, lots, attempt, H.digits(v[8]), v[9] or '', v[10] or '', c.sig, c.owner, H.digits(v[11]), to, v[12] or '', '-1', '-1',
          ride[2] or '', v[7] or ''}
end

-- grants the job of a candidate, and the calls that ride with it; appends to `out`, and says whether a slot is taken
local function grant(P, o, w, room, c, out, now)
  local id, entry, is_new = H.take(P, c.sig, c.owner, c.prio, c.seq)
  if not id then return false end
  local v = H.facts(P, id)
  if v[13] then H.lift_granted(P, w, room, id, v[13], now) end
  if not v.err and v[5] and (v[1] == 'queued' or v[1] == 'running') and tonumber(v[3]) then
    local chunk, its = H.grant_chunk(P, o, w, room, c, #out, id, entry, {state = v[1], seq = v[3], count = v[5], queue = v[6]}, now)
    out[#out + 1] = chunk and described(P, chunk, its)
    return chunk ~= nil
  end
  if v.err or v[1] ~= 'queued' or not tonumber(v[3]) or not tonumber(v[4]) then
    set_aside(P, c, id, entry, v, now)
    return false
  end
  local token, attempt = next_token(o, v, #out)
  local first = assign(P, o, w, c, id, entry, v, token, attempt, H.hold(P, o, w, room, c.need, c.lots, id, token), {}, now)
  redis.call('HINCRBY', P .. 'owners', c.owner, 1)
  out[#out + 1] = first
  if is_new and v[7] and not v[8] then
    first[15] = H.fill_ride(P, c, v[7], entry, id, token, H.GRANTS - #out, function(rider, its, facts, ride)
      local theirs, number = next_token(o, facts, #out)
      out[#out + 1] = assign(P, o, w, c, rider, its, facts, theirs, number, '', {'ride', ride}, now)
    end) or ''
  end
  return true
end

-- grants up to o.max jobs; with room left the worker is registered idle in this very call: no wake-up falls between. One that
-- met more broken records than a call may set aside is rung to go on; one that did not follow its bell hands it on
function H.claim(P, o, now)
  local w, stranger = H.worker(P, o)
  if not w then return stranger end
  redis.call('ZADD', P .. 'workers', now, o.worker)
  if w.nonce == o.nonce then return {'ok', repeated(P, w)} end
  local rung, kept = H.unring(P, o.worker)
  H.idle_remove(P, w.class, o.worker)
  local out, took, names, lines = {}, {}, {}, {}
  if w.state == 'online' and w.quarantined <= now then
    local room = H.room(P, o, w)
    if room.earmark then H.heed(P, o, w, room, now) end
    local tries, slots, c = 0, 0, nil
    while slots < o.max do
      c = room.earmark and H.pick_beside(P, w, room, now) or not room.earmark and H.pick(P, w.class, room) or nil
      if not c or tries == o.max + 8 then break end
      tries = tries + 1
      if kept then lines[c.sig .. ':' .. c.owner .. ':' .. c.prio] = c end
      if grant(P, o, w, room, c, out, now) then
        slots, took[c.sig] = slots + 1, true
      end
    end
    for i, g in ipairs(out) do names[i] = g[1] .. '/' .. g[2] end
    if slots < o.max then
      if c then H.wake(P, w.class, o.worker, '', now) else H.idle_add(P, w.class, o.worker, room) end
    end
  end
  redis.call('HSET', P .. 'worker:' .. o.worker, 'nonce', o.nonce, 'grants', table.concat(names, ' '))
  if rung and not took[rung] then H.hand_on(P, o.worker, rung, now) end
  for _, line in pairs(lines) do H.ring_next(P, line.sig, now, o.worker, line) end
  return {'ok', out}
end
